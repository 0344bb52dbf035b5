//! Model internals: the residual stream between the blocks, and attention weights.

use burn::tensor::Tensor;

use fireclay_kernels::{Backend, reshape};

use crate::transformer::{Tokens, Transformer};

/// Intermediate results of a forward pass.
#[derive(Clone, Debug)]
pub struct Inspection<B: Backend> {
    /// The residual stream `[batch_size, seq_length, d_model]`: the input of the first block, then
    /// the output of each block.
    pub residual: Vec<Tensor<B, 3>>,
    /// The attention weights of each block, f32 `[batch_size, n_heads, seq_length, seq_length]`;
    /// each row, a query, sums to one.
    pub attention: Vec<Tensor<B, 4>>,
}

impl<B: Backend> Inspection<B> {
    /// The weights of one head for one row of the batch, `[seq_length, seq_length]`.
    ///
    /// # Panics
    /// If the layer, row or head does not exist.
    pub fn head(&self, layer: usize, row: usize, head: usize) -> Tensor<B, 2> {
        let weights = self.attention[layer].clone();
        let [_, _, seq_length, keys] = weights.dims();
        weights.slice([row..row + 1, head..head + 1]).reshape([seq_length, keys])
    }
}

impl<B: Backend> Transformer<B> {
    /// A forward pass over `tokens` `[batch_size, seq_length]` that keeps intermediate results. The
    /// blocks are those of [`forward`](Self::forward); attention weights are computed separately,
    /// since fused attention never stores them.
    ///
    /// # Panics
    /// If there are more tokens than `context_length`.
    pub fn inspect(&self, tokens: impl Into<Tokens<B>>) -> Inspection<B> {
        let tokens = tokens.into();
        let [batch_size, seq_length] = tokens.ids.dims();
        let context = self.config().context_length;
        assert!(seq_length <= context, "{seq_length} tokens exceed context_length {context}");
        let stream = |x: &Tensor<B, 2>| reshape(x.clone(), [batch_size, seq_length, self.config().d_model]);
        let _products = self.f32_products().enter();
        let (mut x, pass) = self.begin(tokens, None);
        let mut inspection = Inspection { residual: vec![stream(&x)], attention: Vec::new() };
        for (layer, block) in self.blocks.iter().enumerate() {
            inspection.attention.push(block.attention_weights(x.clone(), &pass));
            x = block.forward(x, &pass, layer, None);
            inspection.residual.push(stream(&x));
        }
        inspection
    }

    /// Logits `[batch_size, seq_length, vocab_size]` of a residual stream `[batch_size, seq_length,
    /// d_model]`, skipping the blocks after it: the logit lens (nostalgebraist, 2020, "interpreting
    /// GPT: the logit lens"). For the last residual stream they are the model's own.
    pub fn logit_lens(&self, residual: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch_size, seq_length, d_model] = residual.dims();
        let rows = self.normalised(reshape(residual, [batch_size * seq_length, d_model]));
        self.logits(reshape(rows, [batch_size, seq_length, d_model]))
    }
}

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use burn::tensor::{Int, Tolerance};

    use super::*;
    use crate::TransformerConfig;

    type B = burn::backend::NdArray;

    fn tokens() -> Tensor<B, 2, Int> {
        Tensor::from_ints([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], &Default::default())
    }

    #[test]
    fn the_lens_of_the_last_stream_is_what_the_model_says() {
        let configs = [
            TransformerConfig::llama(20, 8, 16, 2, 4).with_n_kv_heads(2),
            TransformerConfig::qwen3(20, 8, 16, 2, 4, 8).with_n_kv_heads(2),
            TransformerConfig::gpt2(20, 8, 16, 2, 4),
        ];
        for config in configs {
            let model = config.with_init_deviation(0.2).init::<B>(3, &Default::default()).expect("a model");
            let inspection = model.inspect(tokens());
            assert_eq!((inspection.residual.len(), inspection.attention.len()), (3, 2));
            let last = inspection.residual.last().cloned().expect("a last one");
            let said = model.logits(model.forward(tokens()));
            model.logit_lens(last).into_data().assert_approx_eq::<f32>(&said.into_data(), Tolerance::default());
        }
    }

    #[test]
    fn weights_of_a_causal_model_sum_to_one_and_never_look_ahead() {
        let config = TransformerConfig::llama(20, 8, 16, 2, 4).with_n_kv_heads(2).with_init_deviation(0.5);
        let model = config.init::<B>(3, &Default::default()).expect("a model");
        for weights in model.inspect(tokens()).attention {
            assert_eq!(weights.dims(), [2, 4, 5, 5]);
            let sums = weights.clone().sum_dim(3);
            sums.clone().into_data().assert_approx_eq::<f32>(&sums.ones_like().into_data(), Tolerance::default());
            let ahead = weights.clone().triu(1).abs().sum().into_scalar();
            assert_eq!(ahead, 0.0);
        }
        let head = model.inspect(tokens()).head(1, 1, 3);
        assert_eq!(head.dims(), [5, 5]);
        assert_eq!(head.slice([0..1, 0..1]).into_scalar(), 1.0, "the first token sees itself alone");
    }
}
