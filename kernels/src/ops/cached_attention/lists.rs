//! What kernels that take the rows of a pass together read beside its positions and pages.

use std::sync::OnceLock;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use super::{CachedRow, CachedTokens};

/// Lists on the device, each made when it is first asked for, and so once for all layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lists<B: Backend> {
    rows: OnceLock<Tensor<B, 1, Int>>,
}

impl<B: Backend> CachedTokens<B> {
    /// The row of each new token, `[tokens]`.
    pub(crate) fn row_of_each(&self) -> &Tensor<B, 1, Int> {
        self.lists.rows.get_or_init(|| {
            let rows = self.rows.iter().enumerate();
            self.list(rows.flat_map(|(row, CachedRow { tokens, .. })| std::iter::repeat_n(row, *tokens)).collect())
        })
    }

    fn list(&self, numbers: Vec<usize>) -> Tensor<B, 1, Int> {
        let numbers: Vec<i32> = numbers.into_iter().map(|number| number as i32).collect();
        let count = numbers.len();
        Tensor::from_data(TensorData::new(numbers, [count]), &self.positions.device())
    }
}
