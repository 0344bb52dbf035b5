//! The feed-forward layer of a block: dense, or a mixture of experts.

mod dense;
mod experts;
mod routing;

use burn::module::Module;
use burn::tensor::Tensor;

use fireclay_kernels::{Backend, Dropout, Norm};

pub use self::dense::Dense;
pub use self::experts::Experts;
pub(crate) use self::routing::RoutingRecord;
pub use self::routing::{RouterLosses, Routing};
use crate::layer::LayerConfig;
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::parameters::Initializer;

/// The feed-forward layer of a block.
#[expect(clippy::large_enum_variant, reason = "one a block, and both are small next to their weights")]
#[derive(Module, Debug)]
pub enum FeedForward<B: Backend> {
    /// One layer for all tokens.
    Dense(Dense<B>),
    /// A mixture of experts.
    Experts(Experts<B>),
}

/// A weight of a feed-forward layer that may be stored in other formats.
pub(crate) enum Projection<'a, B: Backend> {
    /// A projection that takes an adapter.
    Linear(&'a mut Linear<B>),
    /// The stacked matrices of experts.
    Stacked(&'a mut Matrix<B>),
}

impl<B: Backend> FeedForward<B> {
    pub(crate) fn new(config: &LayerConfig, init: &mut Initializer<'_, B>) -> Self {
        match config.experts {
            Some(own) => Self::Experts(Experts::new(config, own, init)),
            None => Self::Dense(Dense::new(config, config.d_ff, init)),
        }
    }

    /// The dense layer, if it is one.
    pub fn dense(&self) -> Option<&Dense<B>> {
        match self {
            Self::Dense(dense) => Some(dense),
            Self::Experts(_) => None,
        }
    }

    /// The dense layer, if it is one.
    pub fn dense_mut(&mut self) -> Option<&mut Dense<B>> {
        match self {
            Self::Dense(dense) => Some(dense),
            Self::Experts(_) => None,
        }
    }

    /// The mixture of experts, if it is one.
    pub fn experts(&self) -> Option<&Experts<B>> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts) => Some(experts),
        }
    }

    /// Its linear layers, by their paths.
    pub(crate) fn linears(&self) -> Vec<(&'static str, &Linear<B>)> {
        match self {
            Self::Dense(dense) => {
                vec![("feed_forward.up", &dense.up), ("feed_forward.down", &dense.down)]
            }
            Self::Experts(Experts { shared: Some(shared), .. }) => {
                vec![("feed_forward.experts.shared.up", &shared.up), ("feed_forward.experts.shared.down", &shared.down)]
            }
            Self::Experts(_) => Vec::new(),
        }
    }

    /// Its weights that may be stored in other formats, by their paths.
    pub(crate) fn projections_mut(&mut self) -> Vec<(&'static str, Projection<'_, B>)> {
        match self {
            Self::Dense(dense) => vec![
                ("feed_forward.up", Projection::Linear(&mut dense.up)),
                ("feed_forward.down", Projection::Linear(&mut dense.down)),
            ],
            Self::Experts(Experts { up, down, shared, .. }) => {
                let mut all = vec![
                    ("feed_forward.experts.up", Projection::Stacked(up)),
                    ("feed_forward.experts.down", Projection::Stacked(down)),
                ];
                if let Some(shared) = shared {
                    all.push(("feed_forward.experts.shared.up", Projection::Linear(&mut shared.up)));
                    all.push(("feed_forward.experts.shared.down", Projection::Linear(&mut shared.down)));
                }
                all
            }
        }
    }

    /// The residual stream `x` `[rows, d_model]` plus the layer's output; `pre_norm` is applied to
    /// its input, if given. With what routers are to record.
    pub(crate) fn add_to(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        dropped: Option<Dropout>,
        record: Option<&RoutingRecord<B>>,
    ) -> Tensor<B, 2> {
        match self {
            Self::Dense(dense) => dense.add_to(x, pre_norm, dropped),
            Self::Experts(experts) => experts.add_to(x, pre_norm, dropped, record),
        }
    }

    /// The layer's output `[rows, d_model]`, which the caller adds.
    pub(crate) fn output(
        &self,
        x: Tensor<B, 2>,
        pre_norm: Option<&Norm<B>>,
        record: Option<&RoutingRecord<B>>,
    ) -> Tensor<B, 2> {
        match self {
            Self::Dense(dense) => dense.output(x, pre_norm),
            Self::Experts(experts) => experts.output(x, pre_norm, record),
        }
    }
}
