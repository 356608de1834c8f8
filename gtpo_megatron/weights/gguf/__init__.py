"""Models in GGUF files, the format of llama.cpp: header, conversion to Hugging Face folders, models named by them."""
