"""Folders of Hugging Face models: safetensors in, safetensors out."""
