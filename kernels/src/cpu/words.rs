//! Tensors of 32-bit words as slices.

use burn::tensor::{Int, Tensor};
use burn_ndarray::{NdArray, NdArrayTensor, SharedArray};
use ndarray::IxDyn;

/// 32-bit words in host memory, without a copy.
pub(crate) struct Words(SharedArray<i32>);

impl Words {
    pub(crate) fn of<const D: usize>(packed: Tensor<NdArray, D, Int>) -> Self {
        let shape = packed.dims();
        let array = match packed.into_primitive() {
            NdArrayTensor::I32(storage) => storage.into_shared(),
            primitive => {
                let data = Tensor::<NdArray, D, Int>::from_primitive(primitive).into_data();
                let words: Vec<i32> = data.iter::<i32>().collect();
                SharedArray::from_shape_vec(IxDyn(&shape), words).expect("as many words as the shape says")
            }
        };
        if array.is_standard_layout() {
            Self(array)
        } else {
            Self(array.as_standard_layout().into_owned().into_shared())
        }
    }

    /// The words, for writing; copied only if they are shared.
    pub(crate) fn into_vec(self) -> Vec<i32> {
        let size = self.0.len();
        match self.0.into_owned().into_raw_vec_and_offset() {
            (words, None | Some(0)) if words.len() == size => words,
            (words, offset) => words[offset.unwrap_or(0)..][..size].to_vec(),
        }
    }
}

/// A tensor of `words`.
pub(crate) fn words_tensor<const D: usize>(words: Vec<i32>, shape: [usize; D]) -> Tensor<NdArray, D, Int> {
    let array = SharedArray::from_shape_vec(IxDyn(&shape), words).expect("as many words as the shape says");
    Tensor::from_primitive(NdArrayTensor::I32(array.into()))
}

impl std::ops::Deref for Words {
    type Target = [i32];

    fn deref(&self) -> &[i32] {
        self.0.as_slice().expect("words row after row")
    }
}
