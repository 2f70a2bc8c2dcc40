"""Reading checkpoints: file formats, tensor names and the default model. Knows no device."""
