"""Runs one common workload with Opacus and prints one line of JSON.

Modes:
  nondp      plain eager PyTorch, no privacy
  hooks      per-example gradients by Opacus's hand-written rules
  ghost      ghost / fast gradient clipping (two backward passes)
  functorch  per-example gradients by vmap for every layer
  ew         PyTorch's expanded weights

Sampling is left out of the measure (poisson_sampling=False, one fixed batch).
"""

import argparse
import warnings

import opacus
import torch
import torch_models as common
from opacus.layers import DPLSTM
from torch.utils.data import DataLoader, TensorDataset

MODES = ("nondp", "hooks", "ghost", "functorch", "ew")


def prepare(args):
    private = args.mode != "nondp"
    inputs, targets = common.data(args.workload, args.batch)
    model = common.build(
        args.workload,
        per_example=private,
        lstm_class=DPLSTM if private else torch.nn.LSTM,
    )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE)
    loss_fn = common.criterion(args.workload)
    if private:
        parts = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            criterion=loss_fn,
            data_loader=DataLoader(
                TensorDataset(inputs, targets), batch_size=args.batch
            ),
            noise_multiplier=common.NOISE_MULTIPLIER,
            max_grad_norm=common.CLIP_NORM,
            poisson_sampling=False,
            clipping="flat",
            grad_sample_mode=args.mode,
        )
        model, optimizer = parts[:2]
        if args.mode == "ghost":
            loss_fn = parts[2]
    # Ghost clipping must be told which tokens belong to one example.
    per_token = args.mode == "ghost" and args.workload == "gpt"

    def step():
        optimizer.zero_grad(set_to_none=True)
        outputs = model(inputs)
        extra = {"shape": outputs.shape} if per_token else {}
        loss = loss_fn(*common.flat(args.workload, outputs, targets), **extra)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    common.measure(
        "opacus",
        f"{opacus.__version__} (torch {torch.__version__})",
        common.arguments(MODES, argparse.ArgumentParser(description=__doc__)),
        prepare,
    )
