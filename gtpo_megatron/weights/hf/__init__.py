"""Reader and writer of Hugging Face folders with safetensors."""
