"""Builds nanovllm._C (schemas, CPU operators) and, where a CUDA toolkit fits torch, nanovllm._C_cuda.

NANOVLLM_CUDA=0 never builds the CUDA module, 1 insists on it, auto (default) builds it when a CUDA toolkit is found
and torch is a CUDA build. TORCH_CUDA_ARCH_LIST picks the architectures (default: those of the GPUs present, else
"8.0;9.0a").
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import setup

FLOOR = "0x020b000000000000"  # stable ABI of torch 2.11: one binary serves 2.11 and later


def find_cuda_home() -> str | None:
    """The folder whose bin/nvcc and include/cuda_runtime.h both exist; $CUDA_HOME first."""
    nvcc = shutil.which("nvcc")
    guesses = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    guesses += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for home in filter(None, guesses):
        if Path(home, "bin/nvcc").exists() and Path(home, "include/cuda_runtime.h").exists():
            return home
    return None


def cuda_wanted() -> str | None:
    """CUDA_HOME to build with, or None for a CPU-only build. Refuses in one line what cannot work."""
    switch = os.environ.get("NANOVLLM_CUDA", "auto")
    if switch not in ("0", "1", "auto"):
        sys.exit(f"nanovllm: NANOVLLM_CUDA: expected 0, 1 or auto, got {switch!r}")
    home = find_cuda_home()
    if switch == "0" or (switch == "auto" and (home is None or torch.version.cuda is None)):
        return None
    if home is None:
        sys.exit(
            "nanovllm: NANOVLLM_CUDA=1 but no CUDA toolkit was found; set CUDA_HOME to the folder that has bin/nvcc"
        )
    if torch.version.cuda is None:
        sys.exit(
            f"nanovllm: NANOVLLM_CUDA=1 but torch {torch.__version__} is a CPU build; install a CUDA build of torch"
        )
    out = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    nvcc = re.search(r"release (\d+)\.(\d+)", out)
    if nvcc.group(1) != torch.version.cuda.split(".")[0]:
        sys.exit(
            f"nanovllm: nvcc is {nvcc.group(1)}.{nvcc.group(2)} but torch {torch.__version__} was built for CUDA "
            f"{torch.version.cuda}; the major versions must agree (or set NANOVLLM_CUDA=0 for a CPU-only build)"
        )
    arch = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if arch is None:
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        arch = ";".join(f"{a}.{b}" + ("a" if (a, b) == (9, 0) else "") for a, b in sorted(found)) or "8.0;9.0a"
    if not arch.strip():
        sys.exit('nanovllm: TORCH_CUDA_ARCH_LIST is empty; name at least one architecture, for example "9.0a"')
    os.environ.update(CUDA_HOME=home, TORCH_CUDA_ARCH_LIST=arch)
    return home


CUDA_HOME = cuda_wanted()  # sets CUDA_HOME before cpp_extension reads it
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildPerModule(BuildExtension):
    """Both modules compile csrc/ops/*.cpp, with different macros: each gets its own folder of objects."""

    def build_extension(self, ext):
        base, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
        super().build_extension(ext)
        self.build_temp = base


def extension(kind, name, sources, macros=()):
    cxx = ["-O3", "-std=c++20", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wno-psabi"]
    args = {"cxx": cxx}
    if kind is CUDAExtension:
        args["nvcc"] = [
            "-O3",
            "-std=c++20",
            "-lineinfo",
            "--expt-relaxed-constexpr",
            "-Xcompiler=-fvisibility=hidden",
        ]
    return kind(
        name,
        sorted(sources),
        include_dirs=[str(Path(__file__).parent / "csrc")],
        define_macros=[("TORCH_TARGET_VERSION", FLOOR), *macros],
        extra_compile_args=args,
        py_limited_api=True,
    )


sources = ["csrc/module.cpp", "csrc/bindings.cpp", *glob("csrc/ops/*.cpp"), *glob("csrc/cpu/*.cpp")]
extensions = [extension(CppExtension, "nanovllm._C", sources)]
if CUDA_HOME:
    kernels = glob("csrc/kernels/*.cu")
    # An op registers for CUDA when its kernel exists; torch says NotImplementedError for the others.
    ops = sorted({f"csrc/ops/{Path(k).stem}.cpp" for k in kernels} & set(glob("csrc/ops/*.cpp")))
    archs = os.environ["TORCH_CUDA_ARCH_LIST"].replace(";", " ")
    cuda = [("NV_CUDA", "1"), ("USE_CUDA", "1"), ("NV_CUDA_ARCHS", f'"{archs}"')]
    extensions.append(extension(CUDAExtension, "nanovllm._C_cuda", ["csrc/module.cpp", *ops, *kernels], cuda))
built = f"CUDA for {os.environ['TORCH_CUDA_ARCH_LIST']} with {CUDA_HOME}" if CUDA_HOME else "CPU only"
print(f"nanovllm: building against torch {torch.__version__}: {built}", file=sys.stderr)

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildPerModule},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
