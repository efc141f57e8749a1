"""The C++ extension and the patch folder; everything else is in pyproject.toml.

``patches/`` lies at the top of the checkout and ships as the data package
``vllm_tide._patches``, where :mod:`vllm_tide.patching` finds it once installed.
"""

from pathlib import Path

from setuptools import Extension, find_packages, setup

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
ABI = 0x030B0000  # Python 3.11, the oldest supported
# Bounds of copies and of the stack are checked, and calls cannot be sent elsewhere.
# Python's own flags may name another level, which is a warning.
HARDENED = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-fstack-protector-strong"]

setup(
    packages=[
        *find_packages(include=["vllm_tide", "vllm_tide.*"]),
        "vllm_tide._patches",
    ],
    package_dir={"vllm_tide": "vllm_tide", "vllm_tide._patches": "patches"},
    package_data={
        "vllm_tide": [
            "py.typed",
            "*.pyi",
            "**/*.json",
            "**/*.yaml",
            "**/*.yml",
            "dashboards/*.md",
        ],
        "vllm_tide._patches": ["series", "*/*.patch", "*/manifest.json"],
    },
    ext_modules=[
        Extension(
            "vllm_tide._shm",
            sources=SOURCES,
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            define_macros=[("Py_LIMITED_API", hex(ABI))],
            extra_compile_args=["-O3", "-std=c++17", "-Wall", "-Wextra", *HARDENED],
            extra_link_args=["-Wl,-z,relro,-z,now"],
            py_limited_api=True,
        )
    ]
    if SOURCES
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if SOURCES else {},
)
