"""Many machines: two processes with torchrun, stopped by SIGTERM and resumed."""

import json
from pathlib import Path

from guide import GUIDES, follow
from shapes import photos

PROCESSES = "--nproc_per_node=8"
HOSTS = "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=host:29400"
QUICK = "--model paca_vit_nano --size 32 --epochs 2 --warmup_epochs 1 --batch 16 --device cpu"

photos(Path("photos"), side=32)
follow(
    GUIDES / "machines.md",
    replace={
        PROCESSES: "--nproc_per_node=2",
        HOSTS: "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0",
        "--model paca_vit_b0": QUICK,
        "--data folder:/data/imagenet": "--data folder:photos",
        "--data wds:/data/shards --out /shared/runs/b0": "--data folder:photos --out other",
        "--out /shared/runs/b0": "--out run",
        "--workers 8": "--workers 0",
        "--save_every 500": "--save_every 3",
    },
)
for out in ("run", "other"):
    log = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in log] == [1, 2], log
