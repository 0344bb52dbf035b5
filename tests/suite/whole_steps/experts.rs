//! Whole steps of mixtures of experts.

use super::*;
use crate::experts::with_biases;
use fireclay_model::RouterScores;

/// Mixtures in odd sizes, with every router and dense layers between. In 16 bits all experts are
/// chosen: rounded differently, near choices would differ.
fn mixtures() -> Vec<(&'static str, TransformerConfig, FloatDType, bool)> {
    use FloatDType::{BF16, F16, F32};
    let qwen3 = TransformerConfig::qwen3_moe(VOCABULARY, 512, 128, 3, 4, 32).with_n_kv_heads(1);
    let llama = TransformerConfig::llama(VOCABULARY, 512, 144, 2, 6).with_n_kv_heads(2).with_d_ff(80);
    let gpt2 = TransformerConfig::gpt2(VOCABULARY, 512, 96, 2, 6).with_d_ff(48);
    let few = llama.clone().with_experts(5).with_experts_per_token(3);
    vec![
        ("8 of 128 experts", qwen3.clone().with_d_ff(24), F32, false),
        (
            "a dense layer between",
            qwen3
                .with_d_ff(40)
                .with_experts(9)
                .with_experts_per_token(2)
                .with_dense_layers(vec![1])
                .with_dense_d_ff(Some(112)),
            F32,
            false,
        ),
        ("scores that need not sum to one", few.clone().with_router_normalized(false), F32, false),
        ("a bias for choosing", few.clone().with_choice_bias(true).with_router_bias(true), F32, false),
        (
            "sigmoid scores",
            few.clone().with_router(RouterScores::Sigmoid).with_choice_bias(true).with_expert_scale(2.5),
            F32,
            false,
        ),
        ("INT8", few.with_router(RouterScores::Sigmoid).with_router_normalized(false), F32, true),
        ("Mixtral in bf16", llama.clone().with_experts(3).with_experts_per_token(3), BF16, false),
        ("INT8 and bf16", llama.with_experts(2).with_experts_per_token(2), BF16, true),
        ("GPT-2 in f16", gpt2.with_experts(4).with_experts_per_token(4).with_feed_forward_bias(true), F16, false),
    ]
}

fn mixture<B: Backend>(
    config: TransformerConfig,
    dtype: FloatDType,
    int8: bool,
    device: &B::Device,
) -> Result<Transformer<B>, Failure> {
    let model = with_biases(config.with_init_deviation(0.1).init::<B>(3, device)?);
    let folder = tempfile::tempdir().expect("a folder");
    ModelFolder::new(folder.path()).save(&model)?;
    loaded(folder.path(), dtype, int8, device)
}

/// A mixture in f32 whose routers choose.
fn choosing<B: Backend>(device: &B::Device) -> Result<Transformer<B>, Failure> {
    let (_, config, ..) = mixtures().swap_remove(0);
    mixture(config, FloatDType::F32, false, device)
}

/// Adds rows one after another, and steps with each number of them that kernels differ by.
fn assert_mixture<B: Backend>(model: &Transformer<B>, bound: f64, device: &B::Device) {
    let lengths: [usize; 9] = [1, 130, 63, 300, 64, 5, 180, 17, 2];
    let room = lengths.iter().map(|length| (length + 8).next_multiple_of(PAGE_TOKENS)).sum();
    let mut rows = Rows::new(model, bound, room, device);
    for (row, length) in lengths.into_iter().enumerate() {
        assert!(rows.add(text(row, length), 8));
        if [1, 2, 3, 5, 8, 9].contains(&rows.rows.len()) {
            rows.step();
        }
    }
    rows.remove(0);
    rows.step();
}

/// The mixtures of this range, where the backend has their dtypes.
fn assert_mixtures<B: Backend>(range: std::ops::Range<usize>, device: &B::Device) -> Result<(), Failure> {
    let all = mixtures().into_iter().enumerate().filter(|(at, _)| range.contains(at));
    for (_, (name, config, dtype, int8)) in all {
        let bound = match dtype {
            FloatDType::BF16 => 0.03,
            FloatDType::F16 => 5e-3,
            _ if B::name(device).contains("cuda") => 5e-3,
            _ => 1e-4,
        };
        if B::supports_dtype(device, DType::from(dtype)) {
            println!("{name}, {dtype:?}, INT8: {int8}");
            assert_mixture(&mixture::<B>(config, dtype, int8, device)?, bound, device);
        }
    }
    Ok(())
}

// In parts, each of which compiles some fifteen kernels.
backend_test!(a_step_of_experts_has_the_hidden_states_of_a_pass_over_the_whole_sequence::<B>(device) {
    assert_mixtures::<B>(0..3, &device)?;
});

backend_test!(a_step_of_experts_that_are_chosen_in_other_ways_has_the_hidden_states_of_a_pass::<B>(device) {
    assert_mixtures::<B>(3..6, &device)?;
});

backend_test!(a_step_of_experts_in_half_precision_has_the_hidden_states_of_a_pass::<B>(device) {
    assert_mixtures::<B>(6..9, &device)?;
});

backend_test!(a_step_of_a_mixture_is_one_operation_where_there_is_a_kernel_for_it::<B>(device) {
    let hopper = on_hopper::<B>(&device)?;
    let (_, config, ..) = mixtures().swap_remove(0);
    for (config, fits) in [(config.clone(), true), (config.with_shared_d_ff(16), false)] {
        let model = mixture::<B>(config, FloatDType::F32, false, &device)?;
        for count in [1, 5] {
            let mut rows = Rows::new(&model, 1.0, count * PAGE_TOKENS, &device);
            (0..count).for_each(|row| assert!(rows.add(text(row, 5), 4)));
            let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
            let mut counted = [0; 2];
            // The first step also tries the kernel.
            for _ in 0..2 {
                let recording = Recording::start::<B>(&device).expect("a recording");
                let tokens = Some((integers(&vec![7; count], &device), &ids[..]));
                let (tokens, _) = model.next_tokens(tokens, &[], &greedy_rows(count, &device), None, &mut rows.cache);
                assert_eq!(tokens.into_data().num_elements(), count);
                let report = recording.stop().expect("a report");
                counted = ["decode_step", "experts"].map(|name| report.calls(name));
            }
            assert_eq!(counted, if hopper && fits { [1, 0] } else { [0, 3] }, "{count} rows");
        }
    }
});

// Which experts the others choose decides what blocks multiply, but not in which order.
backend_test!(a_row_of_a_mixture_does_not_depend_on_the_other_rows_and_repeats_its_bits::<B>(device) {
    let model = choosing::<B>(&device)?;
    for count in [2, 4, 8, 12] {
        let states = |others: usize| {
            let mut rows = Rows::new(&model, 1.0, 2 * count * PAGE_TOKENS, &device);
            for row in 0..count {
                assert!(rows.add(text(if row == 1 { 1 } else { row + others }, 9), 8));
            }
            let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
            let mut all = Vec::new();
            for step in 0..3 {
                let tokens: Vec<u32> =
                    (0..count).map(|row| if row == 1 { 77 + step } else { (row + others) as u32 * 13 }).collect();
                let hidden = model.decode(integers(&tokens, &device), &ids, &mut rows.cache);
                all.extend(values(&hidden.states().cast(DType::F32)));
            }
            all
        };
        let [once, again, others] = [0, 0, 40].map(states);
        assert!(once == again, "{count} rows: other bits");
        let own = |all: &[f32]| all.chunks_exact(128).skip(1).step_by(count).flatten().copied().collect::<Vec<f32>>();
        assert!(own(&once) == own(&others), "{count} rows: it depends on others");
        assert!(once != others, "{count} rows: the others are the same");
    }
});

backend_test!(sequences_of_a_mixture_are_right_in_whole_steps_where_the_cache_is_full::<B>(device) {
    let model = choosing::<B>(&device)?;
    for count in [4, 9] {
        let requests = requests(count);
        let (outputs, preemptions) = write(&model, &requests, 5 * PAGE_TOKENS, &[], &device)?;
        assert!(preemptions > 0, "some are preempted");
        for (request, (output, finish)) in requests.iter().zip(&outputs) {
            assert_eq!((output.len(), *finish), (request.max_tokens, Some(Finish::Length)));
            assert_likeliest(&model, 5e-3, &request.prompt, output, &device);
        }
    }
});

backend_test!(what_a_step_of_a_mixture_draws_is_what_its_logits_say::<B>(device) {
    let model = choosing::<B>(&device)?;
    for count in [1, 5] {
        let mut rows = Rows::new(&model, 1.0, count * PAGE_TOKENS, &device);
        (0..count).for_each(|row| assert!(rows.add(text(row, 5 + row), 8)));
        let ids: Vec<RowId> = rows.rows.iter().map(|(id, _)| *id).collect();
        for (step, temperature) in [0.0, 0.7, 1.3].into_iter().enumerate() {
            let sampling = Sampling::greedy().with_temperature(temperature).with_top_p(Some(0.9));
            let sampled: Vec<SampledRow> = (0..count).map(|row| sampling.with_seed(3, row as u64).into()).collect();
            let sampled = SampledRows::new(&sampled, &device);
            let tokens = Some((integers(&vec![step as u32; count], &device), &ids[..]));
            let (tokens, logits) = model.next_tokens(tokens, &[], &sampled, None, &mut rows.cache);
            let wanted = draw(logits, &sampled, rows.cache.last_positions(), None);
            let [tokens, wanted] = [tokens, wanted].map(|tokens| tokens.into_data().iter().collect::<Vec<i64>>());
            assert_eq!(tokens, wanted, "{count} rows, temperature {temperature}");
        }
    }
});
