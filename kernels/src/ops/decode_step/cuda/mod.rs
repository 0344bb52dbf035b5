//! Fused decode steps for Hopper in CUDA C++: kernels for models of one width, and one for models
//! of any shape.

mod any_shape;
mod kernels;
mod width_1024;

use std::any::Any;
use std::sync::Once;

use burn::cubecl::cuda::CudaRuntime;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::client::ComputeClient;

use self::any_shape::AnyShape;
pub(crate) use self::kernels::hopper_sources;
use self::width_1024::Width1024;
use super::{Declined, DecodeBlock, DecodeBody, DecodePlanned, DecodeStep, Decoded, StepDraw};
use crate::checked::Checked;
use crate::cubecl::assert_reachable;
use crate::cuda::{self, Arch, Arguments, CudaKernel};
use crate::notices::{Level, notice};
use crate::ops::head_sample::cubecl::sampling_params::{SamplingParams, own_counts};
use crate::ops::weight::cubecl::{CubeQuantized, cube_quantized};
use crate::quant::{Format, Reader, Weight};
use crate::tensor::primitive;

/// Byte offset of the state's second word: whether a wait timed out.
const AT_ERROR: usize = 4;

/// Words by which blocks exchange results.
const EXCHANGE: (&str, &str) = ("exchange.cuh", include_str!("sm90/exchange.cuh"));

/// Keeps a tensor's memory alive while a kernel has its address.
type Kept = Box<dyn Any + Send>;

/// The format of a model's matrices, that of its embedding, if decode kernels support it.
fn format_of<B: Backend>(embedding: &Weight<B>) -> Result<Option<Format>, Declined> {
    match embedding.format() {
        Some(format) if !format.is_read_by(Reader::DecodeStep) => {
            Err(Declined::new(format!("kernels of decode steps do not read {}", format.name())))
        }
        format => Ok(format),
    }
}

/// A matrix in `dtype`, or words and scales quantized in `format`.
fn matrix<R, F, I, BT>(
    weight: &Weight<CubeBackend<R, F, I, BT>>,
    name: &str,
    dtype: DType,
    format: Option<Format>,
) -> Result<(CubeTensor<R>, Option<CubeTensor<R>>), Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    match (weight, format) {
        (Weight::Float(weight), None) if weight.dtype() == dtype => Ok((primitive(weight.clone()), None)),
        (Weight::Quantized(weight), Some(format)) if weight.format == format => {
            let CubeQuantized { packed, scales, .. } = cube_quantized(weight.clone());
            Ok((packed, scales))
        }
        (_, Some(format)) => Err(Declined::new(format!("{name} is not {}, as the embedding is", format.name()))),
        (_, None) => Err(Declined::new(format!("{name} is not {}, as activations are", dtype.name()))),
    }
}

/// A contiguous tensor, aligned to 16 bytes.
fn packed<R: CubeRuntime>(x: CubeTensor<R>, name: &str) -> Result<CubeTensor<R>, Declined> {
    let packed = x.is_contiguous() && x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if packed { Ok(x) } else { Err(Declined::new(format!("{name} has gaps"))) }
}

/// The address of a tensor, and the owner of its memory.
fn address<R: CubeRuntime>(x: &CubeTensor<R>) -> Result<(u64, Kept), Declined> {
    assert_reachable(x);
    let client: &dyn Any = &x.client;
    let Some(client) = client.downcast_ref::<ComputeClient<CudaRuntime>>() else {
        return Err(Declined::new("no device of CUDA"));
    };
    let resource =
        client.get_resource(x.handle.clone()).map_err(|error| Declined::new(format!("no address: {error}")))?;
    let address = resource.resource().ptr;
    Ok((address, Box::new(resource)))
}

/// The cosines and sines of all blocks, if they rotate.
fn angles<R, F, I, BT>(blocks: &[DecodeBlock<CubeBackend<R, F, I, BT>>]) -> Result<Option<[CubeTensor<R>; 2]>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let of = |block: &DecodeBlock<CubeBackend<R, F, I, BT>>| {
        let table = block.placement.rotary.as_ref();
        table.map(|table| [&table.cos, &table.sin].map(|x| primitive(x.clone())))
    };
    // Address and layout of a table.
    let place =
        |x: &CubeTensor<R>| Ok::<_, Declined>((address(x)?.0, x.meta.shape().to_vec(), x.meta.strides().to_vec()));
    let Some(first) = blocks.first() else { return Ok(None) };
    let angles = of(first);
    let places =
        |angles: &Option<[CubeTensor<R>; 2]>| angles.iter().flatten().map(place).collect::<Result<Vec<_>, _>>();
    let all = places(&angles)?;
    for block in blocks {
        if places(&of(block))? != all {
            return Err(Declined::new("blocks rotate by tables of their own"));
        }
    }
    if angles.iter().flatten().any(|table| table.dtype != DType::F32) {
        return Err(Declined::new("the rotary table is not f32"));
    }
    Ok(angles)
}

/// The address of an optional tensor, or 0; its memory is kept alive with others.
fn kept<R: CubeRuntime>(x: Option<CubeTensor<R>>, name: &str, held: &mut Vec<Kept>) -> Result<u64, Declined> {
    let Some(x) = x else { return Ok(0) };
    let (address, kept) = address(&x)?;
    if !address.is_multiple_of(16) {
        return Err(Declined::new(format!("{name} begins where 16 bytes cannot be read at once")));
    }
    held.push(kept);
    Ok(address)
}

/// Numbers on the device.
fn integers<R, F, I, BT>(values: Vec<i32>, device: &R::Device) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let count = values.len();
    let data = TensorData::new(values, [count]);
    Tensor::<CubeBackend<R, F, I, BT>, 1, Int>::from_data(data, (device, DType::I32)).into_primitive()
}

/// 64-bit words on the device.
fn halves<R, F, I, BT>(words: Vec<u64>, device: &R::Device) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let halves = words.into_iter().flat_map(|word| [word as u32 as i32, (word >> 32) as u32 as i32]);
    integers::<R, F, I, BT>(halves.collect(), device)
}

/// Prepares a kernel for a model and its caches, if one supports them.
pub(super) fn plan<R, F, I, BT>(
    planned: Checked<DecodePlanned<'_, CubeBackend<R, F, I, BT>>>,
) -> Result<DecodeBody, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let planned = planned.into_inner();
    let on_device = primitive(planned.model.final_norm.gamma.clone());
    if !cuda::takes(&on_device, Arch::Sm90) {
        return Err(Declined::new("the device's compute capability is not 9.0"));
    }
    let made = cuda::in_context(&on_device, || {
        if let Ok((body, most_rows)) = width_1024::plan(&planned) {
            let (head_rows, most_steps) = (kernels::FEW_ROWS, width_1024::most_steps);
            return Ok(DecodeBody { most_rows, head_rows, most_steps, body: Box::new(body) });
        }
        let (body, most_rows) = any_shape::plan(&planned)?;
        Ok(DecodeBody { most_rows, head_rows: most_rows, most_steps: |_, _| 1, body: Box::new(body) })
    });
    let made = made.unwrap_or_else(|error| Err(Declined::new(format!("the device's context: {error:?}"))));
    if let Err(reason) = &made {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            let text = format!("decoding runs one kernel per operation instead of one per step: {reason}");
            notice(Level::Note, &text);
        });
    }
    made
}

/// Processes one more token of each row.
pub(super) fn decode_step<R, F, I, BT>(
    operands: Checked<DecodeStep<'_, CubeBackend<R, F, I, BT>>>,
) -> Result<Decoded<CubeBackend<R, F, I, BT>>, Declined>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let last_position = operands.last_position();
    let DecodeStep { plan, tokens, at, draw, ahead, .. } = operands.into_inner();
    if [tokens.dtype(), at.positions.dtype(), at.pages.dtype()].iter().any(|dtype| *dtype != DType::I32) {
        return Err(Declined::new("tokens, positions and pages are not integers of 32 bits"));
    }
    let body = &plan.body;
    if let Some(width_1024) = body.body.downcast_ref::<Width1024<R>>() {
        // More rows sample in a separate launch.
        let draw = draw.filter(|_| at.rows.len() <= kernels::DRAWN_ROWS);
        let draws = Draws::new(draw, &primitive(plan.model.final_norm.gamma.clone()))?;
        return width_1024::decode_step(width_1024, tokens, at, draws, ahead, last_position);
    }
    let Some(body) = body.body.downcast_ref::<AnyShape<R>>() else { unreachable!("a plan of another backend") };
    any_shape::decode_step(body, tokens, at, last_position)
}

/// Sampling parameters of a step's rows, on the device.
struct Draws<R: CubeRuntime> {
    /// Streams, lines, numbers, and token counts; arbitrary if no row samples.
    pointers: [CubeTensor<R>; 6],
    /// Whether any row samples.
    some: bool,
    /// Number of lines of counts.
    n_lines: usize,
}

impl<R: CubeRuntime> Draws<R> {
    fn new<F: FloatElement, I: IntElement, BT: BoolElement>(
        draw: Option<StepDraw<'_, CubeBackend<R, F, I, BT>>>,
        anything: &CubeTensor<R>,
    ) -> Result<Self, Declined> {
        let none = || anything.clone();
        let Some(StepDraw { rows, counts }) = draw else {
            return Ok(Self { pointers: [(); 6].map(|()| none()), some: false, n_lines: 0 });
        };
        let (SamplingParams { streams, lines, numbers, .. }, counts) =
            (SamplingParams::new(rows), counts.map(own_counts));
        if [&streams, &lines].iter().any(|x| x.dtype != DType::I32) {
            return Err(Declined::new("streams and lines are not integers of 32 bits"));
        }
        let n_lines = counts.as_ref().map_or(0, |[prompt, ..]| prompt.meta.shape()[0]);
        let [prompt, written, bias] = counts.unwrap_or_else(|| [(); 3].map(|()| none()));
        Ok(Self { pointers: [streams, lines, numbers, prompt, written, bias], some: true, n_lines })
    }

    /// With whether they sample, and the number of lines of counts.
    fn words(&self, arguments: Arguments) -> Arguments {
        arguments.word(self.some.into()).word(self.n_lines)
    }
}

/// Launches a kernel. The first step of its kind is also its trial, since a repetition would write
/// the same. The same holds for its `state`, which says whether a wait timed out: its blocks may
/// not all be resident.
fn launch_tried<R: CubeRuntime>(
    state: &CubeTensor<R>,
    kernel: &impl CudaKernel,
    launch: impl Fn(),
) -> Result<(), Declined> {
    let mut first = false;
    let probe = || {
        first = true;
        launch();
    };
    let fault = || {
        let words = match state.client.read_one(state.handle.clone()) {
            Ok(words) => words,
            Err(error) => return Some(error.to_string()),
        };
        let error = words.get(AT_ERROR..AT_ERROR + 4)?;
        error.iter().any(|byte| *byte != 0).then(|| "its blocks timed out waiting for each other".to_string())
    };
    let works = cuda::works_without(state, kernel, "decoding runs one kernel per operation", probe, fault);
    if !works {
        return Err(Declined::new("the kernel failed its trial run"));
    }
    if !first {
        launch();
    }
    Ok(())
}
