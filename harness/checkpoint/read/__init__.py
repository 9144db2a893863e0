"""Files of a checkpoint: index, safetensors headers, mapped bytes."""
