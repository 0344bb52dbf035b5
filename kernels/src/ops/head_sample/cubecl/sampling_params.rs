//! Sampling parameters on the device.

use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::cubecl::contiguous;
use crate::ops::head_sample::{SampledRows, TokenCounts};
use crate::tensor::{float, primitive};

/// Contiguous sampling parameters of rows, on the device.
pub(crate) struct SamplingParams<R: CubeRuntime> {
    pub(super) members: CubeTensor<R>,
    pub(crate) streams: CubeTensor<R>,
    pub(crate) lines: CubeTensor<R>,
    pub(crate) numbers: CubeTensor<R>,
}

impl<R: CubeRuntime> SamplingParams<R> {
    pub(crate) fn new<F, I, BT>(rows: &SampledRows<CubeBackend<R, F, I, BT>>) -> Self
    where
        F: FloatElement,
        I: IntElement,
        BT: BoolElement,
    {
        let SampledRows { members, streams, lines, numbers, .. } = rows;
        let [members, streams, lines] = [members, streams, lines].map(|x| contiguous(x.clone().into_primitive()));
        Self { members, streams, lines, numbers: contiguous(primitive(numbers.clone())) }
    }
}

/// Contiguous counts of prompts and of generated tokens, and biases. The counts of generated tokens
/// are updated in place, unless they are shared or have padded rows.
pub(crate) fn own_counts<R, F, I, BT>(counts: &mut TokenCounts<CubeBackend<R, F, I, BT>>) -> [CubeTensor<R>; 3]
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    counts.written.inplace(|written| {
        let written = primitive(written);
        let own = written.can_mut() && written.is_contiguous();
        float(if own { written } else { contiguous(written.copy()) })
    });
    let [prompt, bias] = [&counts.prompt, &counts.bias].map(|x| contiguous(primitive(x.clone())));
    [prompt, primitive(counts.written.clone()), bias]
}
