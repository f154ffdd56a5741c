"""A family's plain model is the oracle of tests and of `mtpbuild verify`."""

from torch import Tensor, nn

from mtpbuild.builder.models.config import ModelConfig


class Reference(nn.Module):
    """Whole sequences, no caches; names in its state_dict are the checkpoint's."""

    config: ModelConfig
    lm_head: nn.Linear

    def main(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> h [B, T, hidden] after the final norm; lm_head(h_p) predicts t_{p+1}."""
        raise NotImplementedError

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Module k (1-based) over all slots: tokens[:, p] is t_{p+k}, hidden[:, p] is g_{k-1,p}.

        Returns g_{k,p} [B, T, hidden]; lm_head(g_{k,p}) predicts t_{p+k+1}.
        """
        raise NotImplementedError
