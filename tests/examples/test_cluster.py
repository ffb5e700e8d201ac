"""Scripts for clusters that are not here: what their text says."""

import re
import subprocess
from pathlib import Path


CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"


def test_a_slurm_job_has_whole_nodes():
    """Otherwise all that runs in a node's step shares one core, and the memory of one core."""
    script = CLUSTER / "train.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    directives = re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= set(directives)
