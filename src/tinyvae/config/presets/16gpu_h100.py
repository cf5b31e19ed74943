"""The run of h100 on sixteen GPUs: twice the clips in a step.

Command:   ./train_taehv_h100.sh 16 h100 --data_root FOLDER
           (two machines: MASTER_ADDR=node1 RANK=0|1 ./train_taehv_h100.sh 8 h100 --data_root FOLDER)
Hardware:  16 x H100 80 GB; one step is 128 clips of 16 frames at 720x480.
Needs:     what h100 needs, on every machine.
Expect:    the curve of h100 at half the steps or better (not measured by us).
"""

from dataclasses import replace

from tinyvae.config import load_preset

config = replace(
    load_preset("h100"),
    lr_warmup_steps=1_500,
    seraena_start=1_500,
    checkpointing_steps=1_000,
)
