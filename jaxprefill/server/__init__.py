"""HTTP: the routes of OpenAI, SGLang and vLLM over an `EngineClient`. Imports no jax."""
