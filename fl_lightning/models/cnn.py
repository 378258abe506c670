"""Small convolutional nets for images, fast for a whole stack of clients on a CPU.

The nets are those of Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized
Multi-Task Learning: A Sheaf-Theoretic Approach", TMLR 2025 (Sheaf-FMTL), Sec. 4.1 and Table 2. The paper gives numbers
of filters and of hidden units only. Its released code has convolutions of 3 x 3 without padding, each followed by ReLU
and a 2 x 2 max pool: the defaults here. Parameters of a net with ten outputs, and those of Table 2 in thousands:

=======================================  ==============  =========  ===============  =========
net                                      R-MNIST         Table 2    H-CIFAR-10       Table 2
=======================================  ==============  =========  ===============  =========
small: ``filters=(16,)``                  27,210          23         36,458          28
medium: ``filters=(24, 48)``              22,666         121         28,378         154
large: and ``hidden_units=120``          212,146         212        297,202         297
Sec. 4.2: ``filters=(32, 64)``            34,826                     42,442
=======================================  ==============  =========  ===============  =========

The large net has the counts of the table. Those that it gives for the small net are those of the medium one (23 and 28
thousand), and no choice of kernels, padding and pooling that we tried has those that it gives for the medium one.

Every client has its own filters. ``vmap`` makes of that a grouped convolution with the channels first, at which oneDNN
and the pooling are slow; one client after another with the channels last takes 40 % of its time (large net, 40 clients
with 64 images of R-MNIST, forward and backward, one core: 277 ms against 684). This is what the autograd function here
does, on a stack and under ``vmap`` alike; it does not keep what is pooled, the largest of the activations.

Shape legend: C clients, N images, D channels, H rows, W columns, F features of an image, K side of a kernel.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.kernels.autograd import fold_clients
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.output import NetOutput

_SIDE = 2  # of a pool
_POOL = ([_SIDE, _SIDE], [_SIDE, _SIDE], [0, 0], [1, 1], False)  # size, stride, padding, dilation, no partial pools
_UNPADDED = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, not transposed, no groups


class _ConvolvePool(torch.autograd.Function):
    """Convolution, max pool and ReLU (the same as before the pool, on a quarter of the numbers), client by client.

    Shapes:
        x ``(C, N, H, W, D)``, weight ``(C, D', D, K, K)``, bias ``(C, D')``; results ``(C, N, H', W', D')`` with
        ``H' = (H - K + 1) // 2``, and the places of the maxima, alike.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        size = pooled_size(x.shape[2:4], weight.shape[-1])
        pooled = x.new_empty(*x.shape[:2], *size, weight.shape[1])
        indices = torch.empty_like(pooled, dtype=torch.int64)
        for images, kernels, offset, out, where in zip(x, weight, bias, pooled, indices, strict=True):
            convolved = F.conv2d(_channels_second(images), kernels, offset)
            into = {"out": _channels_second(out), "indices": _channels_second(where)}
            torch.ops.aten.max_pool2d_with_indices.out(convolved, *_POOL, **into)
            out.relu_()
        return pooled, indices

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        x, weight, pooled, indices = ctx.saved_tensors
        num_filters, kernel_size = weight.shape[1], weight.shape[-1]
        rows, columns = (length - kernel_size + 1 for length in x.shape[2:4])
        convolved = _channels_second(x.new_empty(x.shape[1], rows, columns, num_filters))  # its values are not read
        grads = []
        for images, kernels, of_out, out, where in zip(x, weight, grad, pooled, indices, strict=True):
            of_max = torch.ops.aten.threshold_backward(_channels_second(of_out), _channels_second(out), 0)
            of_convolved = torch.ops.aten.max_pool2d_with_indices_backward(
                of_max, convolved, *_POOL, _channels_second(where)
            )
            of_x, *of_parameters = torch.ops.aten.convolution_backward(
                of_convolved, _channels_second(images), kernels, [num_filters], *_UNPADDED, list(ctx.needs_input_grad)
            )
            grads.append((None if of_x is None else _channels_last(of_x), *of_parameters))
        of_inputs = zip(*grads, strict=True)
        return tuple(
            torch.stack(each) if need else None for each, need in zip(of_inputs, ctx.needs_input_grad, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Any, tuple[int, int]]:
        folded = fold_clients(info.batch_size, in_dims, tensors)
        outputs = _ConvolvePool.apply(*folded)  # type: ignore[no-untyped-call]
        return tuple(output.unflatten(0, (info.batch_size, -1)) for output in outputs), (0, 0)


def pooled_size(size: Sequence[int], kernel_size: int) -> list[int]:
    """Rows and columns after a convolution without padding and a 2 x 2 pool.

    Example:
        >>> pooled_size([28, 28], kernel_size=3)
        [13, 13]
    """
    return [(length - kernel_size + 1) // _SIDE for length in size]


def _channels_last(x_NDHW: Tensor) -> Tensor:
    return x_NDHW.movedim(-3, -1)


def _channels_second(x_NHWD: Tensor) -> Tensor:
    return x_NHWD.movedim(-1, -3)


class PooledConvolution(nn.Conv2d):
    """Convolution without padding, ReLU and a 2 x 2 max pool, on images with the channels last.

    The images, and with them weight and bias, may have a leading client dimension.

    Args:
        in_channels: Channels of the images.
        out_channels: Number of filters.
        kernel_size: Side of a filter.
    """

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., N, H, W, D) to (..., N, H', W', D')."""
        assert self.bias is not None
        tensors = [input, self.weight, self.bias]
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            tensors = [tensor.to(dtype) for tensor in tensors]
        if input.dim() == 5:
            tensors = [
                tensor.expand(len(input), *tensor.shape) if tensor.dim() == dims else tensor
                for tensor, dims in zip(tensors, (4, 4, 1), strict=True)
            ]
            return _ConvolvePool.apply(*tensors)[0]  # type: ignore[no-untyped-call, no-any-return]
        alone = (tensor.unsqueeze(0) for tensor in tensors)
        return _ConvolvePool.apply(*alone)[0].squeeze(0)  # type: ignore[no-untyped-call, no-any-return]


class CNN(nn.Module):
    """Convolutions, each followed by ReLU and a 2 x 2 max pool, then at most one hidden layer, then a linear read-out.

    The convolutions (``convs.*``) and the hidden layer (``hidden.*``) are the backbone, ``head.*`` is the read-out; the
    embedding is what the read-out reads, before dropout.

    Args:
        in_features: (D, H, W): channels, rows and columns of an image.
        num_outputs: Number of classes.
        filters: Number of filters of each convolution, at least one.
        hidden_units: Width of the hidden layer; None for none.
        kernel_size: Side of the filters, without padding.
        dropout: Drop probability of what the hidden layer and the read-out read, in [0, 1).

    Shapes:
        batch.x ``(N, D, H, W)``; logits ``(N, num_outputs)``; embedding ``(N, F)``, or ``(N, hidden_units)``; all of
        them with a leading C for a stack.

    Raises:
        ValueError: The shape of an example is not that of an image, the images are too small for the convolutions, a
            number is below 1, or the dropout is no probability below 1.

    Example:
        >>> net = CNN((1, 28, 28), 10, filters=(32, 64), hidden_units=120)
        >>> sum(parameter.numel() for parameter in net.parameters())
        212146
    """

    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(
        self,
        in_features: int | tuple[int, ...],
        num_outputs: int,
        *,
        filters: tuple[int, ...] = (32, 64),
        hidden_units: int | None = None,
        kernel_size: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if isinstance(in_features, int) or len(in_features) != 3:
            raise ValueError(
                f"in_features={in_features} is not the shape of an image, (channels, rows, columns): "
                "give CNN a source of images, or choose MLP"
            )
        if not filters:
            raise ValueError(f"filters={filters} is impossible: give the number of filters of at least one convolution")
        num_channels, *size = in_features
        for width in filters:
            check_widths(filters=width)
        check_widths(channels=num_channels, num_outputs=num_outputs, kernel_size=kernel_size)
        self.dropout = check_dropout(dropout)
        for _ in filters:
            size = pooled_size(size, kernel_size)
        if min(size) < 1:
            raise ValueError(
                f"kernel_size={kernel_size} with filters={tuple(filters)} is impossible on images of "
                f"{in_features[1]} x {in_features[2]}: {len(filters)} convolutions and pools leave nothing of them. "
                "Set a smaller kernel_size or fewer filters"
            )
        pairs = itertools.pairwise([num_channels, *filters])
        self.convs = nn.ModuleList(PooledConvolution(*pair, kernel_size=kernel_size) for pair in pairs)
        self.seen = size
        for _ in filters:
            self.seen = [length * _SIDE + kernel_size - 1 for length in self.seen]
        width = filters[-1] * size[0] * size[1]
        if hidden_units is not None:
            check_widths(hidden_units=hidden_units)
        self.hidden = None if hidden_units is None else Linear(width, hidden_units)
        self.head = Linear(width if hidden_units is None else hidden_units, num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Return logits and embeddings of all images of one client."""
        embedding_NF = h_NF = self.convolve(batch.x)
        if self.training:
            h_NF = dropout(h_NF, batch.key, self.dropout)
        if self.hidden is not None:
            embedding_NF = h_NF = self.hidden(h_NF).relu()
            if self.training:
                h_NF = dropout(h_NF, batch.key + 1, self.dropout)
        return NetOutput(self.head(h_NF), embedding_NF)

    def convolve(self, x_NDHW: Tensor) -> Tensor:
        """The convolutions' features, (N, F), ordered as by ``torch.nn.Flatten``.

        Pools leave out an odd last row or column. What no feature depends on for that is cut off beforehand, which
        saves a sixth of the time on 28 x 28 pixels.
        """
        seen_NDHW = x_NDHW[..., : self.seen[0], : self.seen[1]]
        # the copy has the strides of channels last also where the channel is only one
        x_NHWD = _channels_last(seen_NDHW).clone(memory_format=torch.contiguous_format)
        for conv in self.convs:
            x_NHWD = conv(x_NHWD)
        return _channels_second(x_NHWD).flatten(-3)
