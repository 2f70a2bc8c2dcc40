"""Executables as typed records: what they cost, hold and should not hold. Changes nothing."""
