"""What a mixture of experts needs beside Megatron: balance, replayed routing, layers without CUDA."""
