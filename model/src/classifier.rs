//! The head of a sequence classifier, as `BertForSequenceClassification` and
//! `ModernBertForSequenceClassification` of transformers have it.
//!
//! ```text
//! hidden states -> pooling (first token, or mean) -> dense -> activation -> norm -> dropout -> output
//! ```

use burn::module::{Module, Param};
use burn::tensor::activation::{log_softmax, tanh};
use burn::tensor::{DType, Int, Tensor, TensorData};

use fireclay_kernels::recorder::part;
use fireclay_kernels::{Activation, Backend, Dropout, F32Products, NormKind, activate, dropout, linear, norm};

use crate::classifier_config::{ClassifierConfig, ClassifierPooling};
use crate::config::{NormPlacement, TransformerConfig};
use crate::parameters::{Initializer, LayerNorm};

impl TransformerConfig {
    /// With a head that classifies sequences: the settings of the config's own head, or else
    /// BERT's where norms follow the residual sums, and ModernBERT's elsewhere.
    pub fn with_labels(self, labels: Vec<String>) -> Self {
        let head = self.classifier.clone().unwrap_or_else(|| ClassifierConfig {
            dropout: self.dropout,
            ..match self.norm_placement {
                NormPlacement::Post => ClassifierConfig::bert(),
                _ => ClassifierConfig::default(),
            }
        });
        Self { classifier: Some(ClassifierConfig { labels, ..head }), ..self }
    }
}

/// The weights of a sequence classifier's head.
#[derive(Module, Debug)]
pub struct ClassifierHead<B: Backend> {
    /// The dense layer, `[d_model, d_model]`.
    pub dense: Param<Tensor<B, 2>>,
    /// Its bias, `[d_model]`.
    pub dense_bias: Option<Param<Tensor<B, 1>>>,
    /// The norm after its nonlinearity.
    pub norm: Option<LayerNorm<B>>,
    /// The output layer, `[labels, d_model]`.
    pub output: Param<Tensor<B, 2>>,
    /// Its bias, `[labels]`.
    pub output_bias: Param<Tensor<B, 1>>,
    #[module(skip)]
    settings: ClassifierConfig,
    #[module(skip)]
    pub(crate) f32_products: F32Products,
}

impl<B: Backend> ClassifierHead<B> {
    pub(crate) fn new(config: &TransformerConfig, settings: &ClassifierConfig, init: &mut Initializer<'_, B>) -> Self {
        let width = config.d_model;
        let norm =
            |init: &Initializer<'_, B>| init.norm(width, NormKind::LayerNorm, config.norm_bias, config.norm_epsilon);
        Self {
            dense: init.matrix([width, width], config.init_deviation),
            dense_bias: settings.bias.then(|| init.zeros(width)),
            norm: settings.norm.then(|| norm(init)),
            output: init.matrix([settings.labels.len(), width], config.init_deviation),
            output_bias: init.zeros(settings.labels.len()),
            settings: settings.clone(),
            f32_products: F32Products::Exact,
        }
    }

    /// The settings.
    pub fn settings(&self) -> &ClassifierConfig {
        &self.settings
    }

    /// Logits, f32 `[batch_size, labels]`, of hidden states `[batch_size, seq_length, d_model]` of
    /// rows of `lengths` tokens, `[batch_size]`; without lengths all tokens count.
    pub(crate) fn logits(
        &self,
        hidden: Tensor<B, 3>,
        lengths: Option<Tensor<B, 1, Int>>,
        dropped: Option<Dropout>,
    ) -> Tensor<B, 2> {
        let (_in_classifier, _products) = (part("classifier"), self.f32_products.enter());
        let pooled = self.pooled(hidden, lengths);
        let dense = linear(pooled, self.dense.val(), self.dense_bias.as_ref().map(Param::val));
        let x = match self.settings.activation {
            None => tanh(dense),
            Some(kind) => activate(dense, Activation::plain(kind)),
        };
        let x = match &self.norm {
            Some(weights) => norm(x, &weights.weights()),
            None => x,
        };
        let x = match dropped {
            Some(dropped) => dropout(x, dropped),
            None => x,
        };
        linear(x, self.output.val(), Some(self.output_bias.val()))
    }

    /// One state per sequence, f32 `[batch_size, d_model]`.
    fn pooled(&self, hidden: Tensor<B, 3>, lengths: Option<Tensor<B, 1, Int>>) -> Tensor<B, 2> {
        let [batch_size, seq_length, width] = hidden.dims();
        match (self.settings.pooling, lengths) {
            (ClassifierPooling::Cls, _) => hidden.narrow(1, 0, 1).reshape([batch_size, width]).cast(DType::F32),
            (ClassifierPooling::Mean, None) => hidden.cast(DType::F32).mean_dim(1).reshape([batch_size, width]),
            (ClassifierPooling::Mean, Some(lengths)) => {
                let shape = [batch_size, seq_length];
                let lengths = lengths.reshape([batch_size, 1]);
                let columns = Tensor::<B, 1, Int>::arange(0..seq_length as i64, &hidden.device());
                let real = columns.reshape([1, seq_length]).expand(shape).lower(lengths.clone().expand(shape));
                let shares = real.float().cast(DType::F32) / lengths.float().cast(DType::F32);
                (hidden.cast(DType::F32) * shares.reshape([batch_size, seq_length, 1]))
                    .sum_dim(1)
                    .reshape([batch_size, width])
            }
        }
    }

    /// Replaces the dense layer, and its bias and the scale and shift of the norm where they are
    /// given.
    pub(crate) fn take_pretrained(&mut self, dense: Vec<f32>, vectors: Vec<Option<Vec<f32>>>) {
        let (device, width) = (self.dense.val().device(), self.dense.val().dims()[0]);
        self.dense = Param::from_tensor(Tensor::from_data(TensorData::new(dense, [width; 2]), (&device, DType::F32)));
        let (gamma, beta) = match &mut self.norm {
            Some(norm) => (Some(&mut norm.gamma), norm.beta.as_mut()),
            None => (None, None),
        };
        for (param, values) in [self.dense_bias.as_mut(), gamma, beta].into_iter().zip(vectors) {
            if let (Some(param), Some(values)) = (param, values) {
                let values = TensorData::new(values, [width]);
                *param = Param::from_tensor(Tensor::from_data(values, (&device, DType::F32)));
            }
        }
    }
}

/// Cross entropy, `[1]` in nats, of `logits` `[rows, labels]`, f32, with the probabilities `wanted`
/// of the same shape, each row of which is scaled by its weight: rows of zeros do not count.
pub fn class_loss<B: Backend>(logits: Tensor<B, 2>, wanted: Tensor<B, 2>) -> Tensor<B, 1> {
    let _in_classifier = part("classifier");
    (log_softmax(logits, 1) * wanted).sum().neg()
}
