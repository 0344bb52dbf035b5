//! AdamW in CubeCL: many parameters per launch, at most three launches per group of parameters.
//!
//! A group's kernels bind the buffers of all its parameters. Each cube processes one piece of one
//! parameter, which it finds by comparing its position with the pieces before each parameter, so
//! that step values need no recompilation.

use burn::tensor::{DType, Tensor};
use burn_cubecl::element::BoolElement;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::*;

use super::{AdamW, AdamWParameter, GradientNorm, OptimizerOps, OptimizerStep, Stepped};
use crate::checked::Checked;
use crate::cubecl::{array, contiguous, empty, grid, vector_width};
use crate::tensor::{float, primitive};

const UNITS: u32 = 256;
/// Maximum parameters per launch. Compile time is proportional to it; and CUDA limits launch
/// arguments to 4 KB, of which each parameter takes up to 100 bytes.
const MAX_GROUP: usize = 28;
/// Vectors of a parameter per unit.
const UPDATES: u32 = 1;
/// Vectors of a gradient per unit, to square and sum.
const SQUARES: u32 = 4;

/// A parameter's buffers.
struct Parameter<R: CubeRuntime> {
    value: CubeTensor<R>,
    gradient: CubeTensor<R>,
    first_moment: CubeTensor<R>,
    second_moment: CubeTensor<R>,
    decays: bool,
    copy: Option<CubeTensor<R>>,
}

/// Indices of parameters in one launch, with their common vector width.
struct Group {
    members: Vec<usize>,
    vector: usize,
}

/// The values of a step that all parameters share.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Step {
    rate: f32,
    epsilon: f32,
    first_decay: f32,
    first_gain: f32,
    second_decay: f32,
    second_gain: f32,
    second_bias: f32,
}

impl<R, F, I, BT> OptimizerOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn optimizer_step(operands: Checked<OptimizerStep<'_, Self>>) -> Stepped<Self> {
        let OptimizerStep { parameters, adamw, norm } = operands.into_inner();
        if parameters.is_empty() {
            return (parameters, norm.unwrap_or_else(|| Tensor::zeros([1], &Self::Device::default())));
        }
        let parameters: Vec<Parameter<R>> = parameters
            .into_iter()
            .map(|parameter| Parameter {
                value: writable(primitive(parameter.value)),
                gradient: contiguous(primitive(parameter.gradient)),
                first_moment: writable(primitive(parameter.first_moment)),
                second_moment: writable(primitive(parameter.second_moment)),
                decays: parameter.decays,
                copy: parameter.copy.map(|copy| writable(primitive(copy))),
            })
            .collect();
        let norm = step(&parameters, adamw, norm.map(|norm| contiguous(primitive(norm))));
        let parameters = parameters.into_iter().map(|parameter| AdamWParameter {
            value: float(parameter.value),
            gradient: float(parameter.gradient),
            first_moment: float(parameter.first_moment),
            second_moment: float(parameter.second_moment),
            decays: parameter.decays,
            copy: parameter.copy.map(float),
        });
        (parameters.collect(), float(norm))
    }

    fn gradient_norm(operands: Checked<GradientNorm<Self>>) -> Tensor<Self, 1> {
        let gradients = operands.into_inner().gradients.into_iter().map(|gradient| contiguous(primitive(gradient)));
        // Only gradients are read.
        let alone = |gradient: CubeTensor<R>| Parameter {
            value: gradient.clone(),
            first_moment: gradient.clone(),
            second_moment: gradient.clone(),
            gradient,
            decays: false,
            copy: None,
        };
        let parameters: Vec<Parameter<R>> = gradients.map(alone).collect();
        let squares = squares(&parameters, &groups(&parameters));
        float(clip(squares, None).0)
    }
}

/// Updates the parameters in place, and returns the norm of their gradients, or `norm`, that of all.
fn step<R: CubeRuntime>(parameters: &[Parameter<R>], adamw: &AdamW, norm: Option<CubeTensor<R>>) -> CubeTensor<R> {
    let groups = groups(parameters);
    let squares = match norm {
        Some(norm) => (burn_cubecl::ops::numeric::mul(norm.clone(), norm), 1),
        None => squares(parameters, &groups),
    };
    let (norm, clip) = clip(squares, adamw.max_grad_norm);
    for group in &groups {
        update(parameters, group, &clip, adamw);
    }
    norm
}

/// The tensor, or a copy if its buffer is shared.
fn writable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let x = contiguous(x);
    // A copy may have padded rows.
    if x.can_mut() { x } else { contiguous(x.copy()) }
}

/// Groups of parameters with equal vector width, of similar size.
fn groups<R: CubeRuntime>(parameters: &[Parameter<R>]) -> Vec<Group> {
    // Four or five arrays per parameter, one shared array, and one for the runtime's scalars.
    let arrays = if parameters.iter().any(|parameter| parameter.copy.is_some()) { 5 } else { 4 };
    let bindings = parameters[0].value.client.properties().hardware.max_bindings as usize;
    let limit = (bindings.saturating_sub(2) / arrays).clamp(1, MAX_GROUP);
    let mut by_width: Vec<Group> = Vec::new();
    for (at, parameter) in parameters.iter().enumerate() {
        let Parameter { value, gradient, first_moment, second_moment, copy, .. } = parameter;
        let size = value.meta.num_elements();
        if size == 0 {
            continue;
        }
        let copy = copy.as_ref().unwrap_or(value);
        let vector = vector_width(&[value, gradient, first_moment, second_moment, copy], &[size]);
        match by_width.iter_mut().find(|group| group.vector == vector) {
            Some(group) => group.members.push(at),
            None => by_width.push(Group { members: vec![at], vector }),
        }
    }
    let split = |group: Group| {
        let size = group.members.len().div_ceil(group.members.len().div_ceil(limit));
        let parts: Vec<Vec<usize>> = group.members.chunks(size).map(<[usize]>::to_vec).collect();
        parts.into_iter().map(move |mut members| {
            // Parts of equal length share a compiled kernel; repetitions of the last member are
            // empty.
            let last = members[members.len() - 1];
            members.resize(size, last);
            Group { members, vector: group.vector }
        })
    };
    by_width.into_iter().flat_map(split).collect()
}

impl Group {
    fn arrays<'a, R: CubeRuntime, F: Float, N: Size>(
        &self,
        parameters: &'a [Parameter<R>],
        of: impl Fn(&'a Parameter<R>) -> &'a CubeTensor<R>,
    ) -> SequenceArg<R, Array<Vector<F, N>>> {
        self.members.iter().map(|at| array(of(&parameters[*at]))).collect()
    }

    /// Each parameter's length in vectors, the index of its first piece of `piece` vectors, and
    /// finally the number of pieces.
    fn layout<R: CubeRuntime>(&self, parameters: &[Parameter<R>], piece: u32) -> (Vec<u32>, Vec<u32>) {
        let mut starts = vec![0];
        let mut lengths = Vec::with_capacity(self.members.len());
        let mut before = None;
        for at in &self.members {
            let repeated = before.replace(at) == Some(at);
            let length = if repeated { 0 } else { parameters[*at].value.meta.num_elements() / self.vector };
            lengths.push(length as u32);
            starts.push(starts[starts.len() - 1] + (length as u32).div_ceil(piece));
        }
        (lengths, starts)
    }
}

/// Numbers, the first so many of which add up to the squares of all gradients.
fn squares<R: CubeRuntime>(parameters: &[Parameter<R>], groups: &[Group]) -> (CubeTensor<R>, u32) {
    let like = &parameters[0].value;
    let layouts: Vec<_> = groups.iter().map(|group| group.layout(parameters, SQUARES * UNITS)).collect();
    let pieces = |starts: &[u32]| starts[starts.len() - 1];
    let count = layouts.iter().map(|(_, starts)| pieces(starts)).sum::<u32>();
    let partials = empty(like, [(count as usize).max(1)], DType::F32);
    let mut offset = 0;
    for (group, (lengths, starts)) in groups.iter().zip(&layouts) {
        // SAFETY: a cube writes the partial sum of its own piece, and reads below its parameter's
        // length only.
        unsafe {
            squares_kernel::launch_unchecked(
                &like.client,
                grid(pieces(starts) as usize),
                CubeDim::new_1d(UNITS),
                group.vector,
                group.arrays(parameters, |parameter| &parameter.gradient),
                array(&partials),
                starts.iter().copied().collect(),
                lengths.iter().copied().collect(),
                offset,
            );
        }
        offset += pieces(starts);
    }
    (partials, count)
}

/// The norm of gradients, by numbers that add up to their squares, and the factor that clips them.
fn clip<R: CubeRuntime>(
    (partials, count): (CubeTensor<R>, u32),
    max_grad_norm: Option<f64>,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let like = &partials;
    let (norm, clip) = (empty(like, [1], DType::F32), empty(like, [1], DType::F32));
    // SAFETY: the one cube reads the `count` partial sums and writes one number to each output.
    unsafe {
        norm_kernel::launch_unchecked(
            &like.client,
            grid(1),
            CubeDim::new_1d(UNITS),
            array(&partials),
            array(&norm),
            array(&clip),
            count,
            max_grad_norm.unwrap_or_default() as f32,
            max_grad_norm.is_some(),
        );
    }
    (norm, clip)
}

/// Updates a group's values and moments in place.
fn update<R: CubeRuntime>(parameters: &[Parameter<R>], group: &Group, clip: &CubeTensor<R>, adamw: &AdamW) {
    let (lengths, starts) = group.layout(parameters, UPDATES * UNITS);
    let decayed = (1.0 - adamw.learning_rate * adamw.weight_decay) as f32;
    let kept = group.members.iter().map(|at| if parameters[*at].decays { decayed } else { 1.0 });
    // A parameter without a copy binds another's, which is not accessed.
    let any_copy = group.members.iter().find_map(|at| parameters[*at].copy.as_ref());
    let (copies, copied) = match any_copy {
        Some(any) => {
            let copied = group.members.iter().map(|at| u32::from(parameters[*at].copy.is_some()));
            (group.arrays(parameters, |parameter| parameter.copy.as_ref().unwrap_or(any)), copied.collect())
        }
        None => (SequenceArg::new(), SequenceArg::new()),
    };
    let step = adamw.step as i32;
    let step = StepLaunch::new(
        (adamw.learning_rate / (1.0 - adamw.beta_1.powi(step))) as f32,
        adamw.epsilon as f32,
        adamw.beta_1 as f32,
        (1.0 - adamw.beta_1) as f32,
        adamw.beta_2 as f32,
        (1.0 - adamw.beta_2) as f32,
        (1.0 / (1.0 - adamw.beta_2.powi(step))) as f32,
    );
    // SAFETY: a unit reads and writes vectors of its own below its parameter's length, in buffers
    // that are not shared, but for a copy that stands in for another and is not touched there. All
    // copies have one dtype and their parameters' lengths.
    unsafe {
        update_kernel::launch_unchecked(
            &clip.client,
            grid(starts[starts.len() - 1] as usize),
            CubeDim::new_1d(UNITS),
            group.vector,
            group.arrays(parameters, |parameter| &parameter.gradient),
            array(clip),
            group.arrays(parameters, |parameter| &parameter.value),
            group.arrays(parameters, |parameter| &parameter.first_moment),
            group.arrays(parameters, |parameter| &parameter.second_moment),
            starts.iter().copied().collect(),
            lengths.iter().copied().collect(),
            kept.collect(),
            copies,
            copied,
            step,
            any_copy.map_or(DType::F32, |copy| copy.dtype).into(),
        );
    }
}

#[cube(launch_unchecked)]
fn squares_kernel<N: Size>(
    gradients: &Sequence<Array<Vector<f32, N>>>,
    partials: &mut Array<f32>,
    starts: &Sequence<u32>,
    lengths: &Sequence<u32>,
    offset: u32,
) {
    let cube = CUBE_POS as u32;
    let mut gradient = Array::<Vector<f32, N>>::new(SQUARES as usize);
    #[unroll]
    for at in 0..comptime!(SQUARES as usize) {
        gradient[at] = Vector::new(0.0);
    }
    // Only loads are generated per parameter.
    #[unroll]
    for parameter in 0..gradients.len() {
        let start = starts[parameter];
        if cube >= start && cube < starts[comptime!(parameter + 1)] {
            let begin = (cube - start) * comptime!(SQUARES * UNITS) + UNIT_POS;
            load::<N>(gradients.index(parameter), &mut gradient, begin, lengths[parameter], SQUARES);
        }
    }
    let mut sums = Vector::<f32, N>::new(0.0);
    #[unroll]
    for at in 0..comptime!(SQUARES as usize) {
        sums += gradient[at] * gradient[at];
    }
    let mut sum = 0.0f32;
    #[unroll]
    for lane in 0..N::value() {
        sum += sums[lane];
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 && cube < starts[gradients.len()] {
        partials[(offset + cube) as usize] = sum;
    }
}

/// The sum over a cube's units, in fixed order; valid in the first unit.
#[cube]
fn cube_sum(value: f32) -> f32 {
    let mut sums = SharedMemory::<f32>::new(UNITS as usize);
    sums[UNIT_POS as usize] = value;
    sync_cube();
    #[unroll]
    for halving in 0..comptime!(UNITS.trailing_zeros()) {
        let half = comptime!(UNITS >> (halving + 1));
        if UNIT_POS < half {
            sums[UNIT_POS as usize] = sums[UNIT_POS as usize] + sums[(UNIT_POS + half) as usize];
        }
        sync_cube();
    }
    sums[0]
}

#[cube(launch_unchecked)]
fn norm_kernel(
    partials: &Array<f32>,
    norm: &mut Array<f32>,
    clip: &mut Array<f32>,
    count: u32,
    max: f32,
    #[comptime] clips: bool,
) {
    let mut sum = 0.0f32;
    for at in range_stepped(UNIT_POS, count, UNITS) {
        sum += partials[at as usize];
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 {
        let root = sum.sqrt();
        norm[0] = root;
        // The same 1e-6 as in PyTorch's clip_grad_norm_. NaN has to propagate to the parameters,
        // despite drivers that compile the comparison to a minimum.
        let factor = max / (root + 1e-6);
        let least = select(factor > 1.0, 1.0, factor);
        clip[0] = if comptime!(clips) { select(factor.is_nan(), factor, least) } else { 1.0f32.runtime() };
    }
}

#[cube(launch_unchecked)]
fn update_kernel<C: Float, N: Size>(
    gradients: &Sequence<Array<Vector<f32, N>>>,
    clip: &Array<f32>,
    values: &mut Sequence<Array<Vector<f32, N>>>,
    first_moments: &mut Sequence<Array<Vector<f32, N>>>,
    second_moments: &mut Sequence<Array<Vector<f32, N>>>,
    starts: &Sequence<u32>,
    lengths: &Sequence<u32>,
    kept: &Sequence<f32>,
    copies: &mut Sequence<Array<Vector<C, N>>>,
    copied: &Sequence<u32>,
    step: &Step,
    #[define(C)] _copy_dtype: StorageType,
) {
    let cube = CUBE_POS as u32;
    let mut gradient = Array::<Vector<f32, N>>::new(UPDATES as usize);
    let mut value = Array::<Vector<f32, N>>::new(UPDATES as usize);
    let mut first = Array::<Vector<f32, N>>::new(UPDATES as usize);
    let mut second = Array::<Vector<f32, N>>::new(UPDATES as usize);
    // Only loads and stores are generated per parameter, the arithmetic once.
    let mut keep = 1.0f32;
    let mut begin = 0u32;
    let mut length = 0u32;
    #[unroll]
    for parameter in 0..gradients.len() {
        let start = starts[parameter];
        if cube >= start && cube < starts[comptime!(parameter + 1)] {
            keep = kept[parameter];
            begin = (cube - start) * comptime!(UPDATES * UNITS) + UNIT_POS;
            length = lengths[parameter];
            load::<N>(gradients.index(parameter), &mut gradient, begin, length, UPDATES);
            load::<N>(values.index(parameter), &mut value, begin, length, UPDATES);
            load::<N>(first_moments.index(parameter), &mut first, begin, length, UPDATES);
            load::<N>(second_moments.index(parameter), &mut second, begin, length, UPDATES);
        }
    }
    let clip = Vector::<f32, N>::new(clip[0]);
    #[unroll]
    for at in 0..comptime!(UPDATES as usize) {
        let clipped = gradient[at] * clip;
        let mean = first[at] * Vector::new(step.first_decay) + clipped * Vector::new(step.first_gain);
        let square = second[at] * Vector::new(step.second_decay) + clipped * clipped * Vector::new(step.second_gain);
        let deviation = (square * Vector::new(step.second_bias)).sqrt() + Vector::new(step.epsilon);
        value[at] = value[at] * Vector::new(keep) - mean * Vector::new(step.rate) / deviation;
        first[at] = mean;
        second[at] = square;
    }
    #[unroll]
    for parameter in 0..gradients.len() {
        if cube >= starts[parameter] && cube < starts[comptime!(parameter + 1)] {
            store::<f32, N>(&value, values.index_mut(parameter), begin, length);
            store::<f32, N>(&first, first_moments.index_mut(parameter), begin, length);
            store::<f32, N>(&second, second_moments.index_mut(parameter), begin, length);
        }
    }
    #[unroll]
    for parameter in 0..copies.len() {
        let start = starts[parameter];
        if cube >= start && cube < starts[comptime!(parameter + 1)] && copied[parameter] == 1 {
            store::<C, N>(&value, copies.index_mut(parameter), begin, length);
        }
    }
}

#[cube]
fn load<N: Size>(
    from: &Array<Vector<f32, N>>,
    to: &mut Array<Vector<f32, N>>,
    begin: u32,
    length: u32,
    #[comptime] count: u32,
) {
    #[unroll]
    for at in 0..count {
        let from_at = begin + at * UNITS;
        if from_at < length {
            to[at as usize] = from[from_at as usize];
        }
    }
}

#[cube]
fn store<F: Float, N: Size>(from: &Array<Vector<f32, N>>, to: &mut Array<Vector<F, N>>, begin: u32, length: u32) {
    #[unroll]
    for at in 0..UPDATES {
        let to_at = begin + at * UNITS;
        if to_at < length {
            to[to_at as usize] = Vector::cast_from(from[at as usize]);
        }
    }
}
