"""Read the files of a checkpoint: index, safetensors headers, mapped bytes."""
