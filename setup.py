"""Package definition. Exact pins where upstream's behaviour matters; ranges elsewhere (`requirements/` holds the tested lock)."""

from setuptools import find_packages, setup

CORE = [
    "torch==2.14.1",
    "megatron-core==0.19.2",
    "transformers==5.19.0",
    "triton",
    "psutil",
    "numpy>=2",
    "safetensors>=0.6",
    "tokenizers",
    "ray[default]>=2.50" if False else "ray>=2.50",
    "pydantic>=2.11",
    "pydantic-settings>=2.10",
    "msgspec>=0.19",
    "xxhash>=3.5",
    "pyarrow>=20",
    "aiohttp>=3.12",
    "tenacity>=9",
    "rich>=14",
    "jinja2>=3.1",
    "plotly>=6",
    "math-verify>=0.8",
    "reasoning-gym==0.1.25",
]
