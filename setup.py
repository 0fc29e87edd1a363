"""Package definition: exact pins where upstream's behaviour matters, ranges elsewhere.

`requirements/lock.txt` holds the one tested set of versions, and `tools/setup.sh` makes an environment from it. The extras:

- `cpu`   what SGLang needs on a machine without a GPU. SGLang itself is installed with `--no-deps` there, since its own
          requirements are CUDA kernels.
- `gpu`   all of SGLang, and Transformer Engine.
- `dev`   tests and lint.
- `sinks` optional places for metrics.

Compiled parts are loaded with ctypes, so nothing of Python is in them, and all are optional: without one moerl does the same work
otherwise, more slowly. The CUDA kernel is built where nvcc and a torch with CUDA are found; MOERL_SKIP_CUDA=1 leaves
it out. `build_ext --only=NAME` builds one.
"""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

CORE = [
    "torch==2.14.1",
    "megatron-core==0.19.2",
    "transformers==5.19.0",
    "reasoning-gym==0.1.25",
    "triton",  # megatron-core imports it unconditionally
    "psutil>=6",  # without it Megatron's checkpoint writers die and their parent waits for ever
    "numpy>=2",
    "safetensors>=0.6",
    "tokenizers>=0.22",
    "ray>=2.50,<3",
    "pydantic>=2.11,<3",
    "msgspec>=0.19",
    "xxhash>=3.5",
    "aiohttp>=3.12,<4",
    "tenacity>=9,<10",
    "rich>=14",
    "jinja2>=3.1,<4",
    "plotly>=6",
    "pyarrow>=21",
    "math-verify>=0.8,<1",
]

CPU = [
    "torchvision==0.29.1",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "openai==2.8.0",
    "sentencepiece==0.2.1",
    "soundfile==0.13.1",
    "xgrammar==0.2.7",
    "aiohttp",
    "dill",
    "distro",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "ipython",
    "jsonschema",
    "loguru",
    "msgspec",
    "orjson",
    "partial-json-parser",
    "pillow",
    "prometheus-client",
    "pybase64",
    "python-multipart",
    "pyzmq>=25.1.2",
    "regex",
    "requests",
    "scipy",
    "setproctitle",
    "tqdm",
    "uvicorn>=0.51",
    "uvloop",
    "watchfiles",
    "zstandard",
]

GPU = ["sglang==0.5.23", "transformer-engine[pytorch]>=2.8"]

DEV = [
    "pytest>=8.4",
    "pytest-xdist>=3.8",
    "pytest-timeout>=2.4",
    "hypothesis>=6.130",
    "playwright>=1.60",  # drives a browser in the tests of the report; tools/browser.sh finds one
    "ruff>=0.14",
    "import-linter>=2.5",
    "setuptools>=77",
    "wheel",
]

SINKS = ["tensorboard>=2.19", "wandb>=0.21", "trackio>=0.4"]

CPP = {"language": "c++", "extra_compile_args": ["-O3", "-std=c++17", "-pthread"], "optional": True}
CUDA_TARGETS = ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]


def has_cuda() -> bool:
    """Whether to build for CUDA; torch is not imported, which takes seconds."""
    torch = find_spec("torch")
    if os.environ.get("MOERL_SKIP_CUDA") or not shutil.which("nvcc") or torch is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*= *['\"]", version.read_text(), re.MULTILINE) is not None


class BuildExt(build_ext):
    """Compiles `.cu` sources with nvcc, and on request one extension only."""

    user_options = [*build_ext.user_options, ("only=", None, "name of the one extension to build")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.only = None

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.only:
            self.extensions = [extension for extension in self.extensions if extension.name == self.only]

    def build_extension(self, ext: Extension) -> None:
        if not ext.sources[0].endswith(".cu"):
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.spawn(["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", *CUDA_TARGETS, *ext.sources, "-o", str(target)])


setup(
    name="moerl",
    version=re.search(r'__version__ = "(.+)"', Path(__file__).with_name("moerl").joinpath("__init__.py").read_text())[1],
    description="RL post-training of mixture-of-experts models with exact routing replay",
    python_requires=">=3.12",
    packages=find_packages(include=["moerl", "moerl.*"]),
    package_data={"moerl.rollout": ["shims/*.py"], "moerl.report": ["templates/*"]},
    ext_modules=[
        Extension("moerl.routing._routes", ["csrc/routes.cpp"], **CPP),
        Extension("moerl.reshard.pack._pack", ["csrc/pack.cpp"], depends=["csrc/pack.h"], **CPP),
        *([Extension("moerl.reshard.pack._pack_cuda", ["csrc/pack.cu"], depends=["csrc/pack.h"], optional=True)] if has_cuda() else []),
    ],
    cmdclass={"build_ext": BuildExt},
    install_requires=CORE,
    extras_require={"cpu": CPU, "gpu": GPU, "dev": DEV, "sinks": SINKS},
    entry_points={
        "console_scripts": ["moerl = moerl.cli:main"],
        "sglang.srt.plugins": ["moerl = moerl.rollout.plugin:register", "moerl_sync = moerl.reshard.plugin:register"],
    },
)
