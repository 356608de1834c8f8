"""Other ways to compute the fused output layer, each with the contracts of `tiled_scores`, to be measured on a GPU.

None of them is the product's: `benchmarks.gpu_proof.parts.variants` measures them beside it. One that wins there is
adopted by a call of it in the place of `linear_partials` or `linear_gradients` in `vocab_parallel`.
"""
