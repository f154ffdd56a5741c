"""The GPUs of this machine, as torch finds them."""

import torch


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
