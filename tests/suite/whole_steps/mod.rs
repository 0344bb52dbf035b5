//! Invariants of fused decode steps, on devices with a kernel for these tests' models. Elsewhere
//! the models are smaller and run operation by operation.

mod experts;

use std::path::Path;

use fireclay::Failure;
use fireclay::inference::generation::scheduler::{Finish, Request, Scheduler, SchedulerOptions};
use fireclay_datasets::{Tokenizer, TokenizerKind};
use fireclay_kernels::recorder::Recording;
use fireclay_kernels::{
    ActivationKind, Backend, CacheDType, Format, MultiStep, Penalties, SampledRow, SampledRows, Sampling, TokenCounts,
    draw,
};
use fireclay_model::{
    Cache, Hidden, ModelFolder, NormKind, PAGE_TOKENS, Positions, RowId, Transformer, TransformerConfig,
};

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use crate::backend_test;
use crate::compare::{relative_error, values};
use crate::decoding::greedy_rows;
use crate::scheduling::{Outputs, step};

/// So many that a block of the kernel has more head rows than fit its shared memory.
const VOCABULARY: usize = 30_011;

/// A model in the kernel's dtype and shape, with this many heads and optional INT8 matrices; and
/// the tolerance of its hidden states.
fn model<B: Backend>(heads: usize, int8: bool, device: &B::Device) -> Result<(Transformer<B>, f64), Failure> {
    let half = B::supports_dtype(device, DType::BF16);
    let (d_model, n_heads, head_dim) = if half { (1024, heads, 128) } else { (64, 4, 16) };
    let folder = tempfile::tempdir().expect("a folder");
    save::<B>([d_model, n_heads, head_dim], folder.path(), device)?;
    let (dtype, bound) = if half { (FloatDType::BF16, 0.03) } else { (FloatDType::F32, 1e-4) };
    Ok((loaded(folder.path(), dtype, int8, device)?, bound))
}

/// The model of a folder in a dtype, optionally with INT8 matrices.
fn loaded<B: Backend>(
    folder: &Path,
    dtype: FloatDType,
    int8: bool,
    device: &B::Device,
) -> Result<Transformer<B>, Failure> {
    let model = ModelFolder::new(folder).load_in::<B>(dtype, &mut |_, _| {}, device)?.with_activations(dtype);
    Ok(if int8 { model.with_quantized_matrices(Format::Int8).expect("a device that works") } else { model })
}

/// Models of all causal families in small and odd sizes, and custom shapes.
fn families() -> Vec<(&'static str, TransformerConfig)> {
    let gpt2 = TransformerConfig::gpt2(VOCABULARY, 512, 96, 2, 6);
    let llama = TransformerConfig::llama(VOCABULARY, 512, 144, 2, 6).with_d_ff(352);
    let gated = llama.clone().with_positions(Positions::None).with_head_dim(96).with_feed_forward_bias(true);
    let small = gpt2.clone().with_norm(NormKind::RmsNorm).with_head_dim(8).with_n_kv_heads(3).with_d_ff(112);
    vec![
        ("gpt2", gpt2),
        ("llama", llama.clone().with_n_kv_heads(2)),
        ("mistral", TransformerConfig::mistral(VOCABULARY, 512, 64, 2, 8, 70).with_n_kv_heads(1).with_d_ff(176)),
        ("qwen2", TransformerConfig::qwen2(VOCABULARY, 512, 448, 2, 14).with_n_kv_heads(2).with_d_ff(1216)),
        ("qwen3", TransformerConfig::qwen3(VOCABULARY, 512, 128, 2, 4, 128).with_n_kv_heads(1).with_d_ff(272)),
        ("layer norms, gates of GELU", gated.with_norm(NormKind::LayerNorm).with_activation(ActivationKind::GeluErf)),
        ("ReLU, heads of 8", small.with_activation(ActivationKind::Relu)),
        ("heads of 256", llama.with_head_dim(256).with_n_kv_heads(3)),
    ]
}

fn save<B: Backend>(
    [d_model, n_heads, head_dim]: [usize; 3],
    folder: &Path,
    device: &B::Device,
) -> Result<(), Failure> {
    let config = TransformerConfig::qwen3(VOCABULARY, 8192, d_model, 2, n_heads, head_dim);
    // The maximum and minimum of the kernels.
    let d_ff = if n_heads == 16 { 3 * d_model } else { d_model };
    let config = config.with_n_kv_heads(n_heads / 2).with_d_ff(d_ff).with_init_deviation(0.05);
    Ok(ModelFolder::new(folder).save(&config.init::<B>(3, device)?)?)
}

/// Whether the device has the kernels.
fn on_hopper<B: Backend>(device: &B::Device) -> Result<bool, Failure> {
    let name = crate::backend().devices()?.into_iter().next().map(|device| device.name).unwrap_or_default();
    Ok(B::name(device).contains("cuda") && ["H100", "H200"].iter().any(|known| name.contains(known)))
}

/// A reproducible sequence.
fn text(row: usize, length: usize) -> Vec<u32> {
    (0..length).map(|at| ((7 + 31 * row + 17 * at * at) % VOCABULARY) as u32).collect()
}

fn integers<B: Backend>(tokens: &[u32], device: &B::Device) -> Tensor<B, 1, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
    let count = tokens.len();
    Tensor::from_data(TensorData::new(tokens, [count]), device)
}

/// Cache rows with their sequences, whose steps are compared with passes over whole sequences.
struct Rows<'a, B: Backend> {
    model: &'a Transformer<B>,
    bound: f64,
    device: &'a B::Device,
    cache: Cache<B>,
    rows: Vec<(RowId, Vec<u32>)>,
    steps: usize,
}

impl<'a, B: Backend> Rows<'a, B> {
    fn new(model: &'a Transformer<B>, bound: f64, tokens: usize, device: &'a B::Device) -> Self {
        Self { model, bound, device, cache: model.cache(tokens), rows: Vec::new(), steps: 0 }
    }

    /// Prefills a new row, if there are pages for it and a few more tokens.
    fn add(&mut self, tokens: Vec<u32>, more: usize) -> bool {
        let row = self.cache.add_row();
        let fits = self.cache.reserve(row, tokens.len() + more).is_ok();
        if fits {
            self.model.prefill(&[(row, &tokens)], &mut self.cache);
            self.rows.push((row, tokens));
        } else {
            self.cache.remove_row(row);
        }
        fits
    }

    fn remove(&mut self, at: usize) {
        self.cache.remove_row(self.rows.remove(at).0);
    }

    /// One token more of each row.
    #[track_caller]
    fn step(&mut self) {
        self.step_with_prefill(&[]);
    }

    /// Decodes one token of each row, together with prefill of new ones.
    #[track_caller]
    fn step_with_prefill(&mut self, outputs: &[Vec<u32>]) {
        let step = self.steps;
        self.steps += 1;
        let next: Vec<u32> = self
            .rows
            .iter()
            .enumerate()
            .map(|(row, (_, tokens))| ((11 * row + 5 * step + tokens.len()) % VOCABULARY) as u32)
            .collect();
        self.rows.iter_mut().zip(&next).for_each(|((_, tokens), token)| tokens.push(*token));
        let ids: Vec<RowId> = self.rows.iter().map(|(id, _)| *id).collect();
        let read: Vec<(RowId, &[u32])> = outputs.iter().map(|text| (self.cache.add_row(), &text[..])).collect();
        let decode = Some((integers(&next, self.device), &ids[..]));
        let hidden = self.model.step(decode, &read, &mut self.cache);
        self.rows.extend(read.into_iter().map(|(row, tokens)| (row, tokens.to_vec())));
        let positions = self.cache.last_positions().into_data();
        assert!(positions.iter::<i64>().eq(self.rows.iter().map(|(_, tokens)| tokens.len() as i64 - 1)), "{positions}");
        let [_, d_model] = hidden.states().dims();
        let states = values(&hidden.states().cast(DType::F32));
        self.assert_predictions(hidden, step);
        for (row, (hidden, (_, tokens))) in states.chunks_exact(d_model).zip(&self.rows).enumerate() {
            let whole = self.model.forward(integers(tokens, self.device).reshape([1, tokens.len()]));
            let wanted = values(&whole.narrow(1, tokens.len() - 1, 1).cast(DType::F32));
            let off = relative_error(hidden, &wanted);
            let (rows, length) = (self.rows.len(), tokens.len());
            assert!(off < self.bound, "step {step}, row {row} of {rows}, {length} tokens: off by {off}");
        }
    }

    /// Logits are those of the hidden states, and each row takes its greedy token.
    #[track_caller]
    fn assert_predictions(&self, hidden: Hidden<B>, step: usize) {
        let wanted = self.model.logits(hidden.states().unsqueeze());
        let greedy = greedy_rows(self.rows.len(), self.device);
        let tokens = self.model.sample(hidden.clone(), &greedy, None, &self.cache).into_data();
        let (_, logits) = self.model.sample_logits(hidden, &greedy, None, &self.cache);
        let [logits, wanted] = [values(&logits), values(&wanted.cast(DType::F32))];
        for (row, (token, (logits, wanted))) in
            tokens.iter::<i64>().zip(logits.chunks_exact(VOCABULARY).zip(wanted.chunks_exact(VOCABULARY))).enumerate()
        {
            let off = relative_error(logits, wanted);
            assert!(off < self.bound, "step {step}, row {row}: logits off by {off}");
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|logit| *logit == most).map(|token| token as i64);
            assert_eq!(Some(token), first, "step {step}, row {row}");
        }
    }
}

/// Rows of all lengths, added one after another, so that prefill alternates with steps.
fn assert_hidden_states<B: Backend>(heads: usize, int8: bool, device: &B::Device) -> Result<(), Failure> {
    let (model, bound) = model::<B>(heads, int8, device)?;
    let mut lengths: Vec<usize> = vec![1, 63, 64, 150, 257, 300, 130, 5, 2];
    if B::supports_dtype(device, DType::BF16) {
        // As many as the kernels for each support, and one more.
        lengths.extend((0..if int8 { 26 } else { 120 }).map(|row| 1 + 97 * row * row % 400));
    }
    let room = lengths.iter().map(|length| (length + 40).next_multiple_of(PAGE_TOKENS)).sum();
    let mut rows = Rows::new(&model, bound, room, device);
    for (row, length) in lengths.into_iter().enumerate() {
        assert!(rows.add(text(row, length), 40));
        if [1, 2, 3, 4, 8, 9, 17, 32, 33, 64, 65, 96, 97, 128, 129].contains(&rows.rows.len()) {
            rows.step();
            rows.step();
        }
    }
    Ok(())
}

backend_test!(a_step_has_the_hidden_states_of_a_pass_over_the_whole_sequence::<B>(device) {
    assert_hidden_states::<B>(16, false, &device)?;
});

backend_test!(a_step_of_8_heads_has_the_hidden_states_of_a_pass_over_the_whole_sequence::<B>(device) {
    assert_hidden_states::<B>(8, false, &device)?;
});

backend_test!(a_step_with_int8_weights_has_the_hidden_states_of_a_pass_over_the_whole_sequence::<B>(device) {
    assert_hidden_states::<B>(16, true, &device)?;
});

// Then one more token for all of them.
backend_test!(rows_that_decode_beside_prompts_have_the_hidden_states_of_a_pass_over_the_whole_text::<B>(device) {
    let (model, bound) = model::<B>(16, false, &device)?;
    let mut rows = Rows::new(&model, bound, 40 * PAGE_TOKENS, &device);
    assert!(rows.add(text(0, 70), 10));
    for (step, lengths) in [[300, 1], [5, 64], [129, 2], [63, 17]].into_iter().enumerate() {
        rows.step_with_prefill(&lengths.map(|length| text(step, length)));
        rows.step();
    }
});

// On both sides of a page boundary, around the maximum keys of one block, and far beyond, in all
// row counts of the kernel for few rows.
backend_test!(a_step_of_few_rows_is_right_where_keys_begin_to_be_split::<B>(device) {
    for int8 in [false, true] {
        let (model, bound) = model::<B>(16, int8, &device)?;
        let all: [&[usize]; 4] = [&[253], &[190, 254], &[62, 255, 1000], &[254, 63, 511, 256]];
        for lengths in all {
            let room = lengths.iter().map(|length| (length + 6).next_multiple_of(PAGE_TOKENS)).sum();
            let mut rows = Rows::new(&model, bound, room, &device);
            for (row, length) in lengths.iter().enumerate() {
                assert!(rows.add(text(row, *length), 6));
            }
            (0..6).for_each(|_| rows.step());
        }
    }
});

// Alone, in twos and more, with keys split between blocks, and keys outside of a window.
backend_test!(a_step_of_every_family_has_the_hidden_states_of_a_pass_over_the_whole_text::<B>(device) {
    let bounds = [
        (FloatDType::F32, if B::name(&device).contains("cuda") { 5e-3 } else { 1e-4 }),
        (FloatDType::BF16, 0.03),
        (FloatDType::F16, 5e-3),
    ];
    let bounds: Vec<(FloatDType, f64)> =
        bounds.into_iter().filter(|(dtype, _)| B::supports_dtype(&device, DType::from(*dtype))).collect();
    for (at, (name, config)) in families().into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        ModelFolder::new(folder.path()).save(&config.with_init_deviation(0.05).init::<B>(3, &device)?)?;
        // A family in a dtype compiles some twenty kernels: each occurs in one case.
        let ((dtype, bound), int8) = (bounds[at % bounds.len()], at % 2 == 1);
        println!("{name}, {dtype:?}, INT8: {int8}");
        let model = loaded::<B>(folder.path(), dtype, int8, &device)?;
        let lengths: [usize; 9] = [1, 130, 63, 300, 64, 5, 180, 17, 2];
        let room = lengths.iter().map(|length| (length + 8).next_multiple_of(PAGE_TOKENS)).sum();
        let mut rows = Rows::new(&model, bound, room, &device);
        for (row, length) in lengths.into_iter().enumerate() {
            assert!(rows.add(text(row, length), 8));
            if [1, 2, 4, 7, 9].contains(&rows.rows.len()) {
                rows.step();
            }
        }
        rows.remove(0);
        rows.step();
    }
});

// INT8 values approximate the floats.
backend_test!(a_step_with_a_cache_of_int8_has_nearly_the_hidden_states_of_a_pass_over_the_whole_text::<B>(device) {
    let dtypes: Vec<FloatDType> = [FloatDType::BF16, FloatDType::F32, FloatDType::F16]
        .into_iter()
        .filter(|dtype| B::supports_dtype(&device, DType::from(*dtype)))
        .collect();
    for (at, (name, config)) in families().into_iter().enumerate().filter(|(at, _)| [0, 2, 3, 7].contains(at)) {
        let folder = tempfile::tempdir().expect("a folder");
        ModelFolder::new(folder.path()).save(&config.with_init_deviation(0.05).init::<B>(3, &device)?)?;
        let (dtype, int8) = (dtypes[at % dtypes.len()], at % 2 == 1);
        let model = loaded::<B>(folder.path(), dtype, int8, &device)?.with_int8_cache();
        println!("{name}, {dtype:?}, INT8: {int8}");
        let lengths: [usize; 8] = [1, 130, 300, 64, 5, 180, 17, 2];
        let room = lengths.iter().map(|length| (length + 12).next_multiple_of(PAGE_TOKENS)).sum();
        let mut rows = Rows::new(&model, 0.05, room, &device);
        for (row, length) in lengths.into_iter().enumerate() {
            assert!(rows.add(text(row, length), 12));
            if [1, 2, 4, 7, 8].contains(&rows.rows.len()) {
                (0..2).for_each(|_| rows.step());
            }
        }
    }
});

backend_test!(a_step_of_few_rows_is_one_operation_where_there_is_a_kernel_for_it::<B>(device) {
    let hopper = on_hopper::<B>(&device)?;
    let gpt2 = TransformerConfig::gpt2(VOCABULARY, 512, 96, 2, 6).init::<B>(3, &device)?;
    let with_bytes = model::<B>(16, false, &device)?.0.with_int8_cache();
    let models = [(gpt2, 0.03), model::<B>(16, false, &device)?, model::<B>(16, true, &device)?, (with_bytes, 0.05)];
    for (model, bound) in models {
        let mut rows = Rows::new(&model, bound, 2 * PAGE_TOKENS, &device);
        assert!(rows.add(text(0, 5), 20));
        rows.step();
        let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
        let greedy = greedy_rows(1, &device);
        let drawn = SampledRows::new(&[Sampling::greedy().with_temperature(0.7).with_top_p(Some(0.9)).into()], &device);
        for sampled in [&greedy, &drawn] {
            let recording = Recording::start::<B>(&device).expect("a recording");
            let token = Some((integers(&[7], &device), &ids[..]));
            let (token, _) = model.next_tokens(token, &[], sampled, None, &mut rows.cache);
            let token = token.into_data();
            let report = recording.stop().expect("a report");
            assert_eq!(token.num_elements(), 1);
            let operations = ["decode_step", "cached_attention", "head_sample", "draw"].map(|name| report.calls(name));
            // The kernel for any shape samples in a separate launch.
            let any_shape = model.config().d_model != 1024 || matches!(model.cache_dtype(), CacheDType::Int8);
            let apart = u64::from(!sampled.are_greedy() && any_shape);
            assert_eq!(operations, if hopper { [1, 0, 0, apart] } else { [0, 2, 1, 0] }, "{report}");
        }
    }
});

backend_test!(what_a_step_draws_is_what_its_logits_say::<B>(device) {
    let plain = Sampling::greedy().with_temperature(0.7);
    let penalties = Penalties { repetition: 1.3, presence: 0.2, frequency: 0.1 };
    let ways = [
        Sampling::greedy(),
        plain,
        plain.with_top_k(Some(50)).with_top_p(Some(0.9)),
        plain.with_penalties(penalties).with_top_k(Some(600)),
        plain.with_temperature(0.1).with_top_p(Some(0.5)),
        // Thousands of tokens, most of them compared.
        plain.with_top_p(Some(0.2)),
        plain.with_top_p(Some(0.95)),
        plain.with_min_p(Some(0.2)),
        Sampling::greedy().with_penalties(penalties),
    ];
    for (model, name) in [(model::<B>(16, false, &device)?.0, "halves"), (model::<B>(16, true, &device)?.0, "INT8")] {
        for count in [1, 2, 4] {
            let mut rows = Rows::new(&model, 1.0, count * PAGE_TOKENS, &device);
            for row in 0..count {
                assert!(rows.add(text(row, 5 + row), 20));
            }
            let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
            let mut counts = TokenCounts::<B>::new(count, VOCABULARY, &device);
            (0..count).for_each(|row| {
                counts.begin(row, &text(row, 40), &[7, 9, 7], &[(11, 2.5), (12, TokenCounts::<B>::FORBIDDEN)])
            });
            for (step, shift) in (0..ways.len()).enumerate() {
                let row = |row: usize| {
                    let sampling = ways[(row + shift) % ways.len()].with_seed(3, row as u64);
                    SampledRow { sampling, line: (!sampling.penalties.are_none()).then_some(count - 1 - row) }
                };
                let sampled = SampledRows::new(&(0..count).map(row).collect::<Vec<_>>(), &device);
                let ids_and = Some((integers(&vec![step as u32; count], &device), &ids[..]));
                let mut apart = counts.clone();
                let (tokens, logits) = model.next_tokens(ids_and, &[], &sampled, Some(&mut counts), &mut rows.cache);
                let wanted = draw(logits, &sampled, rows.cache.last_positions(), Some(&mut apart));
                let [tokens, wanted] = [tokens, wanted].map(|tokens| tokens.into_data().iter().collect::<Vec<i64>>());
                assert_eq!(tokens, wanted, "{name}, {count} rows, step {step}");
                let [written, wanted] = [counts.written.clone(), apart.written].map(|counts| counts.into_data());
                assert_eq!(written, wanted, "{name}, {count} rows, step {step}: what is counted");
            }
        }
    }
});

backend_test!(steps_ahead_give_the_tokens_of_steps_one_by_one::<B>(device) {
    let top_k = Sampling::greedy().with_temperature(0.7).with_top_k(Some(50)).with_top_p(Some(0.9));
    let penalised = Sampling::greedy().with_penalties(Penalties { repetition: 1.5, presence: 0.5, frequency: 0.3 });
    let hopper = on_hopper::<B>(&device)?;
    for int8 in [false, true] {
        let (model, _) = model::<B>(16, int8, &device)?;
        // Across page boundaries, and beyond the maximum keys of one block.
        for lengths in [&[230_usize][..], &[5, 1000], &[62, 3, 300], &[1, 120, 700, 255]] {
            for sampling in [Sampling::greedy(), top_k, penalised] {
                let count = lengths.len();
                let room = lengths.iter().map(|length| (length + 60).next_multiple_of(PAGE_TOKENS)).sum();
                let draws = sampling != Sampling::greedy();
                let line = |row: u64| draws.then_some(count - 1 - row as usize);
                let row = |row| SampledRow { sampling: sampling.with_seed(3, row), line: line(row) };
                let sampled = SampledRows::new(&(0..count as u64).map(row).collect::<Vec<_>>(), &device);
                let mut counts = TokenCounts::<B>::new(count, VOCABULARY, &device);
                (0..count).for_each(|row| counts.begin(row, &text(row, 40), &[7], &[(11, -1.5)]));
                let mut outputs = Vec::new();
                let mut launches = Vec::new();
                for most in [1, 13] {
                    let mut counts = counts.clone();
                    let mut rows = Rows::new(&model, 1.0, room, &device);
                    lengths.iter().enumerate().for_each(|(row, length)| assert!(rows.add(text(row, *length), 60)));
                    let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
                    let mut next = integers(&vec![9; count], &device);
                    let mut written: Vec<i64> = Vec::new();
                    let mut steps = Vec::new();
                    while written.len() < 45 * count {
                        let most = most.min(45 - written.len() / count);
                        let most = MultiStep { steps: most, stop_tokens: None };
                        let ahead =
                            model.decode_multi_step(next, &ids, most, &sampled, Some(&mut counts), &mut rows.cache);
                        steps.push(ahead.tokens.dims()[0]);
                        written.extend(ahead.tokens.into_data().iter::<i64>());
                        next = ahead.last;
                    }
                    let last: Vec<i64> = next.to_data().iter().collect();
                    assert_eq!(last, written[44 * count..]);
                    let at: Vec<i64> = rows.cache.last_positions().into_data().iter().collect();
                    assert_eq!(at, lengths.iter().map(|length| *length as i64 + 44).collect::<Vec<_>>());
                    // The cache is the same afterwards, too.
                    let (_, logits) =
                        model.next_tokens(Some((next, &ids)), &[], &sampled, Some(&mut counts), &mut rows.cache);
                    outputs.push((written, values(&logits), counts.written.into_data()));
                    launches.push(steps);
                }
                println!("{count} rows, INT8: {int8}: {:?} launches", launches[1]);
                let ahead = launches[1].iter().any(|steps| *steps > 1);
                assert!(!hopper || ahead == (!draws || count <= 2), "{:?}", launches[1]);
                assert!(launches[0].iter().all(|steps| *steps == 1));
                assert_eq!(outputs[0].0, outputs[1].0, "{count} rows");
                assert!(outputs[0].1 == outputs[1].1, "{count} rows: logits");
                assert_eq!(outputs[0].2, outputs[1].2, "{count} rows: counts");
            }
        }
    }
});

backend_test!(rows_keep_the_token_that_ends_them_in_steps_ahead::<B>(device) {
    let hopper = on_hopper::<B>(&device)?;
    let (model, _) = model::<B>(16, false, &device)?;
    for sampling in [Sampling::greedy(), Sampling::greedy().with_temperature(3.0)] {
        let sampled = [0, 1].map(|row| SampledRow::from(sampling.with_seed(3, row)));
        let sampled = SampledRows::new(&sampled, &device);
        let write = |stop_tokens: Option<[i32; 4]>| {
            let mut rows = Rows::new(&model, 1.0, 4 * PAGE_TOKENS, &device);
            (0..2).for_each(|row| assert!(rows.add(text(row, 5), 60)));
            let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
            let stop_tokens = stop_tokens.map(|stop_tokens| {
                Tensor::<B, 1, Int>::from_data(TensorData::from(stop_tokens), &device).reshape([2, 2])
            });
            let (mut next, mut written): (_, Vec<i64>) = (integers(&[9, 8], &device), Vec::new());
            while written.len() < 2 * 40 {
                let most = MultiStep { steps: 40 - written.len() / 2, stop_tokens: stop_tokens.as_ref() };
                let ahead = model.decode_multi_step(next, &ids, most, &sampled, None, &mut rows.cache);
                written.extend(ahead.tokens.into_data().iter::<i64>());
                next = ahead.last;
            }
            let at: Vec<i64> = rows.cache.last_positions().into_data().iter().collect();
            assert_eq!(at, [44, 44]);
            [0, 1].map(|row| written.iter().skip(row).step_by(2).copied().collect::<Vec<i64>>())
        };
        let free = write(None);
        // One ends early, the other at the first occurrence of its stop token.
        let first = |row: usize, from: usize| {
            let new = |at: &usize| !free[row][..*at].contains(&free[row][*at]);
            (from..40).find(new).or((0..from).rev().find(new)).unwrap_or(0)
        };
        let ended = [first(0, 3), first(1, 13)];
        let [a, b] = [0, 1].map(|row| free[row][ended[row]] as i32);
        for (row, kept) in write(Some([a, -1, VOCABULARY as i32 - 1, b])).into_iter().enumerate() {
            let (before, behind) = kept.split_at(ended[row] + 1);
            assert_eq!(before, &free[row][..=ended[row]], "row {row}");
            // With single steps, the device does not check for stop tokens.
            assert!(
                !hopper || behind.iter().all(|token| *token == before[ended[row]]),
                "row {row}: {ended:?}, {behind:?}"
            );
        }
    }
});

backend_test!(of_top_k_one_a_step_draws_its_likeliest_token_at_any_temperature::<B>(device) {
    let (model, _) = model::<B>(16, false, &device)?;
    let mut rows = Rows::new(&model, 1.0, 4 * PAGE_TOKENS, &device);
    for row in 0..3 {
        assert!(rows.add(text(row, 5 + row), 20));
    }
    let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
    // Sampled from a step's logits, together with the greedy tokens that it found itself.
    let row = |row| SampledRow::from(Sampling::greedy().with_temperature(1e6).with_top_k(Some(1)).with_seed(3, row));
    let drawn = SampledRows::new(&(0..3).map(row).collect::<Vec<_>>(), &device);
    for step in 0..4 {
        let hidden = model.decode(integers(&[step, 7, 9], &device), &ids, &mut rows.cache);
        let (tokens, logits) = model.sample_logits(hidden.clone(), &drawn, None, &rows.cache);
        let tokens: Vec<i64> = tokens.into_data().iter().collect();
        let wanted: Vec<i64> =
            model.sample(hidden, &greedy_rows(3, &device), None, &rows.cache).into_data().iter().collect();
        assert_eq!(tokens, wanted, "step {step}");
        assert_eq!(logits.dims(), [3, VOCABULARY]);
    }
});

backend_test!(a_step_whose_logits_are_not_numbers_draws_none::<B>(device) {
    let (mut model, _) = model::<B>(16, false, &device)?;
    let norm = model.final_norm.as_mut().expect("a norm before the head");
    norm.gamma = Param::from_tensor(norm.gamma.val() * f32::NAN);
    let mut rows = Rows::new(&model, 1.0, 2 * PAGE_TOKENS, &device);
    assert!(rows.add(text(0, 5), 20));
    let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
    for sampling in [Sampling::greedy(), Sampling::greedy().with_temperature(0.8)] {
        let hidden = model.decode(integers(&[7], &device), &ids, &mut rows.cache);
        let sampled = SampledRows::new(&[sampling.into()], &device);
        let tokens: Vec<i64> = model.sample(hidden, &sampled, None, &rows.cache).into_data().iter().collect();
        assert_eq!(tokens, [-1]);
        let token = Some((integers(&[7], &device), &ids[..]));
        let (tokens, _) = model.next_tokens(token, &[], &sampled, None, &mut rows.cache);
        assert_eq!(tokens.into_data().iter::<i64>().collect::<Vec<_>>(), [-1]);
    }
});

backend_test!(rows_that_leave_a_full_cache_change_no_other_and_leave_their_pages::<B>(device) {
    for int8 in [false, true] {
        let (model, bound) = model::<B>(16, int8, &device)?;
        let mut rows = Rows::new(&model, bound, 8 * PAGE_TOKENS, &device);
        // All eight pages are taken.
        for (row, length) in [60, 100, 1, 110, 50].into_iter().enumerate() {
            assert!(rows.add(text(row, length), 14), "row {row}");
        }
        assert!(!rows.add(text(9, 3), 1), "the cache is full");
        assert_eq!(rows.cache.pages().1, 0, "no page is left");
        // From five rows to one: with both kernels. New rows take the pages of removed ones.
        for (leaves, comes) in [(1, None), (2, Some(90)), (0, None), (1, None), (0, Some(30)), (0, None)] {
            rows.step();
            rows.remove(leaves);
            rows.step();
            if let Some(length) = comes {
                assert!(rows.add(text(20 + length, length), 14));
                rows.step();
            }
        }
        while !rows.rows.is_empty() {
            rows.remove(0);
        }
        let (pages, left) = rows.cache.pages();
        assert_eq!(left, pages, "all pages are back");
    }
});

/// The output of a request, and how it finished.
type RequestOutput = (Vec<u32>, Option<Finish>);

/// Each token of a sequence is the greedy one after those before it, up to rounding.
#[track_caller]
fn assert_likeliest<B: Backend>(model: &Transformer<B>, bound: f64, prompt: &[u32], text: &[u32], device: &B::Device) {
    let all: Vec<u32> = prompt.iter().chain(text).copied().collect();
    let logits = model.logits(model.forward(integers(&all, device).reshape([1, all.len()])));
    let logits = values(&logits.cast(DType::F32));
    for (at, (token, logits)) in text.iter().zip(logits.chunks_exact(VOCABULARY).skip(prompt.len() - 1)).enumerate() {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let deviation = (logits.iter().map(|logit| logit * logit).sum::<f32>() / VOCABULARY as f32).sqrt();
        let chosen = logits[*token as usize];
        assert!(
            f64::from(most - chosen) < 4.0 * bound * f64::from(deviation),
            "token {at}: {chosen} where the top token has {most}, deviation {deviation}"
        );
    }
}

/// Greedy requests in one scheduler, some of which are cancelled at a step; finally no pages are
/// left in use.
fn write<B: Backend>(
    model: &Transformer<B>,
    requests: &[Request],
    cache_tokens: usize,
    cancelled: &[(usize, usize)],
    device: &B::Device,
) -> Result<(Vec<RequestOutput>, usize), Failure> {
    let options = SchedulerOptions { rows: 12, step_tokens: 256, cache_tokens };
    let mut scheduler = Scheduler::new(model, options, device.clone());
    let ids = requests.iter().map(|request| scheduler.add(request.clone())).collect::<Result<Vec<_>, _>>()?;
    let mut outputs = Outputs::new();
    for at in 0.. {
        cancelled.iter().filter(|(step, _)| *step == at).for_each(|(_, request)| scheduler.cancel(ids[*request]));
        if scheduler.is_idle() {
            break;
        }
        assert!(at < 5000, "it does not end");
        step(&mut scheduler, model, &mut outputs)?;
    }
    let load = scheduler.load();
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.free_pages), (0, 0, 0, load.pages), "{load:?}");
    Ok((ids.iter().map(|id| outputs.remove(id).unwrap_or_default()).collect(), load.preemptions))
}

fn requests(count: usize) -> Vec<Request> {
    (0..count).map(|row| Request::new(text(row, 3 + 37 * row % 150), 30 + 5 * row)).collect()
}

backend_test!(a_text_that_ends_changes_no_other_in_whole_steps::<B>(device) {
    let (model, bound) = model::<B>(16, false, &device)?;
    for count in [3, 9] {
        let mut requests = requests(count);
        let (outputs, _) = write(&model, &requests, 64 * PAGE_TOKENS, &[], &device)?;
        // Some stop at a token in their middle.
        for (request, (text, _)) in requests.iter_mut().zip(&outputs).step_by(2) {
            request.stop_tokens = vec![text[text.len() / 2]];
        }
        let (outputs, _) = write(&model, &requests, 64 * PAGE_TOKENS, &[], &device)?;
        let ended = outputs.iter().filter(|(_, finish)| *finish == Some(Finish::End)).count();
        assert!(ended > 0, "{outputs:?}");
        for (request, (text, finish)) in requests.iter().zip(&outputs) {
            let by = if *finish == Some(Finish::End) { Finish::End } else { Finish::Length };
            assert_eq!(*finish, Some(by));
            assert!(by == Finish::End || text.len() == request.max_tokens);
            assert!(
                text.iter().rev().skip(1).all(|token| !request.stop_tokens.contains(token)),
                "it goes on behind its end"
            );
            assert_likeliest(&model, bound, &request.prompt, text, &device);
        }
    }
});

backend_test!(a_text_that_is_cancelled_changes_no_other_in_whole_steps::<B>(device) {
    let (model, bound) = model::<B>(16, false, &device)?;
    // A few sequences get several tokens per step.
    for (count, cancelled) in [(3, vec![(3, 1)]), (9, vec![(10, 1), (20, 0), (25, 7)])] {
        let requests = requests(count);
        let (outputs, _) = write(&model, &requests, 64 * PAGE_TOKENS, &cancelled, &device)?;
        for (at, (request, (text, finish))) in requests.iter().zip(&outputs).enumerate() {
            let gone = cancelled.iter().any(|(_, request)| *request == at);
            assert_eq!(*finish, (!gone).then_some(Finish::Length), "request {at}");
            assert!(gone || text.len() == request.max_tokens);
            assert_likeliest(&model, bound, &request.prompt, text, &device);
        }
    }
});

backend_test!(texts_are_right_in_whole_steps_where_the_cache_is_full::<B>(device) {
    let (model, bound) = model::<B>(16, false, &device)?;
    for count in [4, 9] {
        let requests = requests(count);
        let (outputs, preemptions) = write(&model, &requests, 5 * PAGE_TOKENS, &[], &device)?;
        assert!(preemptions > 0, "some have to give way");
        for (request, (text, finish)) in requests.iter().zip(&outputs) {
            assert_eq!((text.len(), *finish), (request.max_tokens, Some(Finish::Length)));
            assert_likeliest(&model, bound, &request.prompt, text, &device);
        }
    }
});

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_text_with_130_and_keeps_what_was_written() {
    use std::io::Read;
    use std::process::{Command, Stdio};

    struct Saved<'a>(&'a Path);
    impl fireclay::backend::OnBackend for Saved<'_> {
        type Output = ();
        fn run<B: Backend>(
            self,
            fireclay::backend::RunContext { device, .. }: fireclay::backend::RunContext<B>,
        ) -> Result<(), Failure> {
            let half = B::supports_dtype(&device, DType::BF16);
            save::<B>(if half { [1024, 16, 128] } else { [64, 4, 16] }, self.0, &device)
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    crate::run(Saved(folder.path()));
    let letters: String = ('\u{100}'..).take(VOCABULARY - 2).collect();
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &letters).expect("a tokenizer");
    tokenizer.save(&folder.path().join("tokenizer.json")).expect("a file");
    let arguments =
        ["generate", "--backend", crate::backend().as_str(), "--prompt", "\u{101}\u{102}", "--max-tokens", "8000"];
    let mut command = crate::cli::program();
    command.args(arguments).args(["--model", crate::cli::text(folder.path()), "--temperature", "0.9"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut stdout = child.stdout.take().expect("its stdout");
    let mut written = vec![0; 24];
    stdout.read_exact(&mut written).expect("a text that is being written");
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill is installed");
    assert!(sent.success());
    stdout.read_to_end(&mut written).expect("the rest");
    let mut told = String::new();
    child.stderr.take().expect("its stderr").read_to_string(&mut told).expect("text");
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130), "{told}");
    let written = String::from_utf8(written).expect("whole letters");
    assert!(written.chars().count() < 8000 && written.ends_with('\n'), "{written}");
}
