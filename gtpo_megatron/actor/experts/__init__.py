"""What a mixture of experts needs beside Megatron: balance and replayed routing."""
