//! Which words a text has, and how often.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::Backend;

/// How often each word stands in each row of a batch, on the device: f32, `[batch_size, vocabulary]`.
#[derive(Clone, Debug)]
pub struct TokenCounts<B: Backend> {
    /// In the prompt.
    pub prompt: Tensor<B, 2>,
    /// Behind it.
    pub written: Tensor<B, 2>,
}

impl<B: Backend> TokenCounts<B> {
    /// Of prompts, one for each row, of words in `0..vocabulary`.
    ///
    /// # Panics
    /// If a word lies outside of the vocabulary.
    pub fn of_prompts(prompts: &[&[u32]], vocabulary: usize, device: &B::Device) -> Self {
        let mut counts = vec![0f32; prompts.len() * vocabulary];
        for (row, prompt) in prompts.iter().enumerate() {
            let row = &mut counts[row * vocabulary..][..vocabulary];
            prompt.iter().for_each(|token| row[*token as usize] += 1.0);
        }
        let data = TensorData::new(counts, [prompts.len(), vocabulary]);
        let prompt = Tensor::<B, 2>::from_data(data, (device, DType::F32));
        Self { written: prompt.zeros_like(), prompt }
    }

    /// Counts one more written token for each row, `[batch_size]`.
    pub fn add(&mut self, tokens: Tensor<B, 1, Int>) {
        let tokens = tokens.unsqueeze_dim::<2>(1);
        let ones = Tensor::<B, 2>::ones(tokens.dims(), (&self.written.device(), DType::F32));
        self.written.inplace(|written| written.scatter(1, tokens, ones, IndexingUpdateOp::Add));
    }
}
