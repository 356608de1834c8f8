"""Transformer Engine's own Python on a CPU: the entry points of its C++ extension answered by torch. Test-only.

A GPU's path through Transformer Engine is mostly Python: its modules, its autograd functions, its choice of a kernel,
its ring of context-parallel ranks, its optimizer, and Megatron's classes around them. All of that runs here as it is.
What is missing without a GPU is one module, ``transformer_engine_torch``: ``extension`` puts another in its place,
whose functions do what the kernels do, with float32 sums and the dtypes of the kernels' results. What the actor does
not call refuses, with its name.

=====================  ==============================================================================================
``matmul_and_norm``    matrix products, RMSNorm, rotary embeddings
``attention``          fused attention of packed sequences, forward and backward, with softmax statistics
``context_parallel``   halves of packed sequences, for the ring of context-parallel ranks
``optimizer``          Adam, norms and scaling over lists of tensors
``extension``          the module itself: enumerations, answers, refusals
``device``             what ``torch.cuda`` says of an H100, and which tensors are on it
``gpu_actor``          the project's actor as it is built where there is a GPU
``installed``          all of this in the process that imports it
=====================  ==============================================================================================

``tests/gpu_stack`` proves each answer against plain torch, and the actor against transformers. Not shown by any of it:
the kernels' own rounding and speed, streams and their races, NCCL.
"""
