//! What is known of the rows that tokens are drawn for.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};

/// How often each token stands in each row of a batch, on the device: f32, `[batch_size, vocabulary]`.
#[derive(Clone, Debug)]
pub struct TokenCounts<B: Backend> {
    /// In the prompt.
    pub prompt: Tensor<B, 2>,
    /// Behind it.
    pub written: Tensor<B, 2>,
}

impl<B: Backend> TokenCounts<B> {
    /// Of prompts, one for each row, of tokens in `0..vocabulary`.
    ///
    /// # Panics
    /// If a token lies outside of the vocabulary.
    pub fn of_prompts(prompts: &[&[u32]], vocabulary: usize, device: &B::Device) -> Self {
        let mut counts = vec![0f32; prompts.len() * vocabulary];
        for (row, prompt) in prompts.iter().enumerate() {
            let row = &mut counts[row * vocabulary..][..vocabulary];
            for token in *prompt {
                assert!(
                    (*token as usize) < vocabulary,
                    "head_sample: token {token} of a vocabulary of {vocabulary} tokens"
                );
                row[*token as usize] += 1.0;
            }
        }
        // In one row: some devices leave gaps between the rows of a matrix.
        let (size, shape) = (counts.len(), [prompts.len(), vocabulary]);
        let options = (device, DType::F32);
        Self {
            prompt: Tensor::<B, 1>::from_data(TensorData::new(counts, [size]), options).reshape(shape),
            written: Tensor::<B, 1>::zeros([size], options).reshape(shape),
        }
    }
}

/// The rows of a batch that tokens are drawn for.
#[derive(Debug)]
pub struct SampledRows<B: Backend> {
    /// The row of random bits that each draws by, `[batch_size]`.
    pub streams: Tensor<B, 1, Int>,
    /// The tokens that each has, where there are penalties for them. A draw adds the token that it chooses.
    pub counts: Option<TokenCounts<B>>,
}

impl<B: Backend> SampledRows<B> {
    /// Rows that draw by the given streams, whatever their place in the batch, without penalties.
    pub fn new(streams: &[u32], device: &B::Device) -> Self {
        let streams: Vec<i32> = streams.iter().map(|stream| *stream as i32).collect();
        let count = streams.len();
        Self { streams: Tensor::from_data(TensorData::new(streams, [count]), device), counts: None }
    }

    /// With what the texts have so far.
    pub fn with_counts(mut self, counts: Option<TokenCounts<B>>) -> Self {
        self.counts = counts;
        self
    }
}
