//! [`Backend`] for [`Autodiff`]: each operation with a hand-written gradient enters the graph as one node.
//!
//! The nodes stand beside their operations, in `backward.rs`. Operations without a method here compose others, and
//! get their gradients from those.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::Ops;
use burn::tensor::backend::ExecutionError;
use burn::tensor::{FloatDType, Int, Tensor, TensorPrimitive};

use crate::ops::activation::{self, Activation};
use crate::ops::attention::{self, AttentionMask, AttentionOptions};
use crate::ops::dropout::{self, Dropout};
use crate::ops::embed;
use crate::ops::head_loss::{self, HeadLossOptions};
use crate::ops::linear;
use crate::ops::norm::{self, Norm};
use crate::ops::reshape;
use crate::ops::rotary::{self, RotaryTable};
use crate::ops::softmax;
use crate::packed_heads::PackedHeads;
use crate::recorder::Probe;
use crate::{Backend, RandomKey};

impl<B: Backend, C: CheckpointStrategy> Backend for Autodiff<B, C> {
    fn probe(device: &Self::Device) -> Option<Box<dyn Probe>> {
        B::probe(device)
    }

    fn finish_uploads(device: &Self::Device) -> Result<(), ExecutionError> {
        B::finish_uploads(device)
    }

    fn reshape<const D: usize, const E: usize>(x: Tensor<Self, D>, shape: [usize; E]) -> Tensor<Self, E> {
        reshape::autodiff::reshape(x, shape)
    }

    fn random_bits(rows: usize, columns: usize, key: RandomKey, device: &Self::Device) -> Tensor<Self, 2, Int> {
        from_inner_int(B::random_bits(rows, columns, key, device))
    }

    fn dropout(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        dropout::autodiff::dropout(x, dropout)
    }

    /// The copy takes the parameter's place in the graph, so that gradients go to the parameter without a node between.
    fn rounded(value: Tensor<Self, 2>, copy: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let mut tracked = primitive(value);
        tracked.primitive = primitive(copy).primitive;
        float(tracked)
    }

    fn embed(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, dtype: FloatDType) -> Tensor<Self, 3> {
        embed::autodiff::embed(table, tokens, dtype)
    }

    fn embed_add(table: Tensor<Self, 2>, tokens: Tensor<Self, 2, Int>, x: Tensor<Self, 3>) -> Tensor<Self, 3> {
        embed::autodiff::embed_add(table, tokens, x)
    }

    fn norm(x: Tensor<Self, 2>, norm: &Norm<Self>) -> Tensor<Self, 2> {
        norm::autodiff::norm(x, norm)
    }

    fn softmax(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        softmax::autodiff::softmax(x)
    }

    fn linear(x: Tensor<Self, 2>, weight: Tensor<Self, 2>, bias: Option<Tensor<Self, 1>>) -> Tensor<Self, 2> {
        linear::autodiff::linear(x, weight, bias)
    }

    fn linear_add(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        dropout: Option<Dropout>,
        residual: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear::autodiff::linear_add(x, weight, bias, dropout, residual)
    }

    fn linear_activate(
        x: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        bias: Option<Tensor<Self, 1>>,
        activation: Activation,
    ) -> Tensor<Self, 2> {
        linear::autodiff::linear_activate(x, weight, bias, activation)
    }

    fn activate(x: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        activation::autodiff::activate(x, activation)
    }

    fn rotary(
        x: Tensor<Self, 4>,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 4> {
        rotary::autodiff::rotary(x, table, positions, inverse)
    }

    fn qkv_rotary(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        table: &RotaryTable<Self>,
        positions: Tensor<Self, 2, Int>,
        inverse: bool,
    ) -> Tensor<Self, 3> {
        rotary::autodiff::qkv_rotary(qkv, heads, table, positions, inverse)
    }

    fn attention(
        query: Tensor<Self, 4>,
        key: Tensor<Self, 4>,
        value: Tensor<Self, 4>,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 4> {
        attention::autodiff::attention(query, key, value, mask, options)
    }

    fn qkv_attention(
        qkv: Tensor<Self, 3>,
        heads: PackedHeads,
        mask: &AttentionMask<Self>,
        options: AttentionOptions,
    ) -> Tensor<Self, 4> {
        attention::autodiff::qkv_attention(qkv, heads, mask, options)
    }

    fn head_loss(
        hidden: Tensor<Self, 2>,
        weight: Tensor<Self, 2>,
        targets: Tensor<Self, 1, Int>,
        options: HeadLossOptions,
    ) -> Tensor<Self, 1> {
        head_loss::autodiff::head_loss(hidden, weight, targets, options)
    }
}

/// A tensor of the wrapped backend, from its primitive.
pub(crate) fn float<B: burn::tensor::backend::Backend, const D: usize>(
    primitive: B::FloatTensorPrimitive,
) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The float primitive under a tensor.
pub(crate) fn primitive<B: burn::tensor::backend::Backend, const D: usize>(
    tensor: Tensor<B, D>,
) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

/// The wrapped backend's view of a float tensor, out of the graph.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: &Tensor<Autodiff<B, C>, D>,
) -> Tensor<B, D> {
    tensor.clone().inner()
}

/// The wrapped backend's view of an integer tensor.
pub(crate) fn inner_int<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: Tensor<Autodiff<B, C>, D, Int>,
) -> Tensor<B, D, Int> {
    Tensor::from_primitive(tensor.into_primitive())
}

/// An integer tensor of the wrapped backend, seen from outside.
pub(crate) fn from_inner_int<B: Backend, C: CheckpointStrategy, const D: usize>(
    tensor: Tensor<B, D, Int>,
) -> Tensor<Autodiff<B, C>, D, Int> {
    Tensor::from_primitive(tensor.into_primitive())
}

/// Takes out the gradient that a parent of an operation has so far, from other uses of it, so that the operation's own
/// kernel adds the two. `None` where it has none yet. `like` is any tensor of the wrapped backend: gradients are looked
/// up by a tensor of the graph, of which only the node counts.
pub(crate) fn take_gradient<B: Backend, S, const N: usize, const D: usize>(
    ops: &Ops<S, N>,
    parent: usize,
    like: &Tensor<B, D>,
    grads: &mut Gradients,
) -> Option<Tensor<B, D>> {
    let node = ops.parents[parent].clone()?;
    let mut tracked = primitive(Tensor::<Autodiff<B>, D>::from_inner(like.clone()));
    tracked.node = node;
    grads.remove::<B>(&tracked).map(float)
}

/// `[rows, columns]` as `[.., columns]`; a matrix stays the same node of the graph.
pub(crate) fn as_dims<B: Backend, const D: usize>(rows: Tensor<B, 2>, dims: [usize; D]) -> Tensor<B, D> {
    if D == 2 { Tensor::from_primitive(rows.into_primitive()) } else { B::reshape(rows, dims) }
}

/// `[.., columns]` as `[rows, columns]`; a matrix stays the same node of the graph.
pub(crate) fn as_rows<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 2> {
    if D == 2 {
        return Tensor::from_primitive(tensor.into_primitive());
    }
    let dims: [usize; D] = tensor.dims();
    B::reshape(tensor, [dims[..D - 1].iter().product(), dims[D - 1]])
}
