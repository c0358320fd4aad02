"""Trains a small GPT with accumulation, clipping and a schedule."""

import torch
from tests.support.scripts.gpt import OPTIONS, RANK, make, optimizer_of, save, windows
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

accumulation = OPTIONS["accumulation"]
model = make()
optimizer = optimizer_of(model)
batches = DataLoader(windows(), batch_size=OPTIONS["batch"], shuffle=OPTIONS["shuffle"])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: OPTIONS["rate"] * 0.9**step)

for _ in range(OPTIONS["epochs"]):
    for number, (text, following) in enumerate(batches, start=1):
        if OPTIONS["raise_on"] == RANK and number == 3:
            raise ValueError("batch 3 is bad")
        loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
        (loss / accumulation).backward()
        if number % accumulation == 0 or number == len(batches):
            nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["clip"])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if number == OPTIONS["break_at"]:
            break
save(model)
