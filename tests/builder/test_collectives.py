"""What ranks exchange, as AOTInductor compiles it once for all of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._inductor.package.package import package_aoti

from mtpbuild.builder.models.common import collectives
from mtpbuild.builder.models.common.collectives import gather_best, make_rank_constant
from mtpbuild.builder.targets.inductor import lowering
from mtpbuild.builder.targets.inductor.lowering import aoti_options, share_kernels
from mtpbuild.plugins.accept_rewind.op import best_token
from mtpbuild.runtime.contract.manifest import CONSTANTS
from mtpbuild.runtime.programs.aot_package import Package
from tests.support.inductor_engines import compiled_soon

RANKS, OWN = 3, 31  # tokens of a rank


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rank = make_rank_constant()

    def forward(self, logits: Tensor) -> Tensor:
        return gather_best(logits, self.rank, RANKS)


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Head()

    def forward(self, logits: Tensor) -> Tensor:
        best: Tensor = self.model(logits)
        return best


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore")  # what torch says of itself while it compiles
def test_the_best_tokens_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a rank is not folded into the program; the sum of all is made here."""
    monkeypatch.setattr(collectives, "all_reduce", lambda x: x)
    torch.manual_seed(0)
    logits = torch.randn(RANKS, 40, 1, OWN)
    program = torch.export.export(Program(), (logits[0],), strict=False)
    path = tmp_path / "best.pt2"
    with compiled_soon(), share_kernels():
        files = lowering._compile(
            program.module(check_guards=False),
            (logits[0],),
            str(tmp_path),
            aoti_options(on_gpu=False),
        )
        package_aoti(str(path), files)
    constants = {name: value.detach() for name, value in program.state_dict.items()}
    save_file(constants, path.with_name(CONSTANTS.format(path.stem)))
    ranks = [Package(path, {}, "cpu", rank).run([own])[0] for rank, own in enumerate(logits)]
    whole = torch.cat([*logits], dim=-1)
    assert torch.equal(best_token(torch.stack(ranks).sum(0)), whole.argmax(-1))
