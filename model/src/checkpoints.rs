//! Activation checkpointing: the backward pass recomputes the activations of blocks instead of
//! storing them (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").
//!
//! ```text
//! forward    tokens -> x0 -> [blocks 0, 1] -> x1 -> [blocks 2, 3] -> x2 -> [blocks 4, 5] -> loss
//!            kept      kept                 kept                   kept     all activations kept
//!
//! backward   of the loss down to x2; then blocks 2, 3 again from x1, and back; then blocks 0, 1 from x0; the embedding
//! ```

use std::ops::Range;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use fireclay_kernels::{Backend, backward, backward_from, reshape};

use crate::feed_forward::{Routing, RoutingRecord};
use crate::pass::Pass;
use crate::transformer::{Tokens, Transformer};

/// The gradients of a backward pass.
type Gradients<B> = <Autodiff<B> as AutodiffBackend>::Gradients;

/// What the forward pass keeps for recomputation.
pub struct Checkpoints<B: Backend> {
    tokens: Tokens<Autodiff<B>>,
    segments: Vec<Segment<B>>,
    pass: Pass<Autodiff<B>>,
    /// The input of the blocks that are not recomputed, where their graph starts.
    last: Tensor<Autodiff<B>, 2>,
    routing: Option<Routing<Autodiff<B>>>,
}

impl<B: Backend> Checkpoints<B> {
    /// How routers distributed the tokens, if
    /// [`set_router_losses`](Transformer::set_router_losses) asked for it. Recomputing blocks
    /// counts nothing twice.
    pub fn take_routing(&mut self) -> Option<Routing<Autodiff<B>>> {
        self.routing.take()
    }
}

/// Blocks that are recomputed together.
struct Segment<B: Backend> {
    layers: Range<usize>,
    /// The residual stream before them.
    input: Tensor<Autodiff<B>, 2>,
}

impl<B: Backend> Transformer<Autodiff<B>> {
    /// [`forward`](Transformer::forward) that keeps only the input of every `every` blocks, except
    /// for the last ones. Use [`backward`](Self::backward) instead of the loss's own.
    ///
    /// # Panics
    /// If `every` is zero, or a row exceeds `context_length`.
    pub fn forward_with_checkpoints(
        &self,
        tokens: impl Into<Tokens<Autodiff<B>>>,
        every: usize,
    ) -> (Tensor<Autodiff<B>, 3>, Checkpoints<B>) {
        assert!(every > 0, "checkpoints of every 0 blocks");
        let tokens = tokens.into();
        let [batch_size, seq_length] = self.dims(&tokens);
        // Each graph is built just before its backward pass: with two pending graphs that share a
        // parameter, Burn may free parts of one when the other is done.
        let untracked = self.clone().no_grad();
        let (mut x, pass) = untracked.begin(tokens.clone(), None);
        let mut segments = Vec::new();
        let mut layers = 0..every.min(self.blocks.len());
        while layers.end < self.blocks.len() {
            segments.push(Segment { layers: layers.clone(), input: x.clone() });
            x = untracked.through(layers.clone(), x, &pass);
            layers = layers.end..(layers.end + every).min(self.blocks.len());
        }
        let last = x.detach().require_grad();
        let x = self.through(layers, last.clone(), &pass);
        let hidden = reshape(self.normalised(x), [batch_size, seq_length, self.config().d_model]);
        let routing = pass.routing.as_ref().and_then(RoutingRecord::take);
        (hidden, Checkpoints { tokens, segments, pass, last, routing })
    }

    /// The backward pass of a loss computed from
    /// [`forward_with_checkpoints`](Self::forward_with_checkpoints), added to the gradients of an
    /// `earlier` one, if given. Calls `again` after each recomputation.
    ///
    /// # Panics
    /// If nothing in the loss's graph is tracked.
    pub fn backward(
        &self,
        loss: Tensor<Autodiff<B>, 1>,
        checkpoints: Checkpoints<B>,
        earlier: Option<Gradients<B>>,
        mut again: impl FnMut(),
    ) -> Gradients<B> {
        let Checkpoints { tokens, mut segments, pass, last, .. } = checkpoints;
        let mut gradients = backward(loss, earlier);
        // None if the loss does not depend on the hidden states.
        let mut grad = last.grad_remove(&mut gradients);
        drop(last);
        while let Some(segment) = segments.pop() {
            let Some(known) = grad.take() else { return gradients };
            let input = segment.input.detach().require_grad();
            let output = self.through(segment.layers, input.clone(), &pass);
            again();
            gradients = backward_from(output, known, gradients);
            grad = input.grad_remove(&mut gradients);
        }
        match grad {
            Some(grad) => backward_from(self.embedded(tokens, &pass), grad, gradients),
            None => gradients,
        }
    }

    /// The residual stream after some of the blocks.
    fn through(
        &self,
        layers: Range<usize>,
        x: Tensor<Autodiff<B>, 2>,
        pass: &Pass<Autodiff<B>>,
    ) -> Tensor<Autodiff<B>, 2> {
        let _products = self.f32_products().enter();
        layers.fold(x, |x, layer| self.blocks[layer].forward(x, pass, layer, None))
    }
}
