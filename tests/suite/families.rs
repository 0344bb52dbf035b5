//! Invariants of every model family.

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::Backend;
use fireclay_model::{
    ModelFolder, NormKind, NormPlacement, Positions, RotaryScaling, RouterScores, Transformer, TransformerConfig,
};

use crate::backend_test;
use crate::compare::{assert_close, tolerance, values};

/// A small model of every causal family, and custom shapes.
pub(crate) fn causal_families() -> Vec<(&'static str, TransformerConfig)> {
    let gpt2 = TransformerConfig::gpt2(50, 24, 32, 2, 4);
    let llama = TransformerConfig::llama(50, 24, 32, 2, 4);
    vec![
        ("gpt2", gpt2.clone()),
        ("llama", llama.clone().with_n_kv_heads(2)),
        ("mistral", TransformerConfig::mistral(50, 24, 32, 2, 4, 5)),
        ("qwen2", TransformerConfig::qwen2(50, 24, 32, 2, 4).with_n_kv_heads(1)),
        ("qwen3", TransformerConfig::qwen3(50, 24, 32, 2, 4, 10)),
        ("no positions", gpt2.clone().with_positions(Positions::None)),
        ("llama with windows by layer", llama.clone().with_layer_windows(vec![3, 0])),
        ("gemma2", {
            let gemma = TransformerConfig::gemma2(50, 24, 32, 2, 4, 5).with_n_kv_heads(2).with_head_dim(6);
            gemma.with_attention_softcap(Some(1.5)).with_logit_softcap(Some(2.0)).with_attention_scale(Some(0.3))
        }),
        ("gemma3", {
            let gemma = TransformerConfig::gemma3(50, 24, 32, 2, 4, 5).with_sliding_window(None);
            gemma.with_n_kv_heads(1).with_layer_windows(vec![3, 0])
        }),
        ("olmo2", TransformerConfig::olmo2(50, 24, 32, 2, 4).with_n_kv_heads(2)),
        ("olmo3", {
            let window = Positions::Rotary { base: 100.0, scaling: RotaryScaling::None };
            TransformerConfig::olmo2(50, 24, 32, 2, 4)
                .with_layer_windows(vec![4, 0])
                .with_window_positions(Some(window))
        }),
        ("smollm3", TransformerConfig::smollm3(50, 24, 32, 2, 4).with_layers_without_positions(vec![1])),
        ("phi3", llama.clone().with_rotary_dim(Some(6)).with_n_kv_heads(2)),
        ("granite", {
            let granite = llama.clone().with_attention_scale(Some(0.6)).with_embedding_multiplier(3.0);
            granite.with_residual_multiplier(0.4).with_logit_divisor(4.0).with_output_bias(true)
        }),
        ("llama with norms around its layers", {
            let llama = llama.clone().with_norm_placement(NormPlacement::Both).with_feed_forward_bias(true);
            llama.with_residual_multiplier(0.7).with_norm(NormKind::LayerNorm)
        }),
        ("mixtral", {
            let mixtral = TransformerConfig::mixtral(50, 24, 32, 2, 4).with_n_kv_heads(2).with_d_ff(20);
            mixtral.with_experts(5).with_experts_per_token(2)
        }),
        ("qwen3_moe", {
            let qwen = TransformerConfig::qwen3_moe(50, 24, 32, 2, 4, 10).with_d_ff(12).with_dense_layers(vec![0]);
            qwen.with_experts(6).with_experts_per_token(3).with_dense_d_ff(Some(20))
        }),
        ("olmoe", {
            let olmoe = TransformerConfig::olmoe(50, 24, 32, 2, 4).with_d_ff(12).with_qkv_clip(Some(0.9));
            olmoe.with_experts(4).with_experts_per_token(3)
        }),
        ("gpt_oss", {
            let gpt_oss = TransformerConfig::gpt_oss(50, 24, 32, 2, 4, 5).with_d_ff(12).with_expert_limit(Some(0.4));
            gpt_oss.with_n_kv_heads(2).with_experts(4).with_experts_per_token(2)
        }),
        ("gpt2 with experts that sigmoids choose, and one for all", {
            let gpt2 = gpt2.with_experts(4).with_experts_per_token(2).with_d_ff(12).with_shared_d_ff(8);
            gpt2.with_router(RouterScores::Sigmoid).with_choice_bias(true).with_expert_scale(1.7)
        }),
        ("llama with norms on outputs, and experts", {
            let llama = llama.clone().with_norm_placement(NormPlacement::Output).with_residual_multiplier(0.6);
            llama.with_experts(3).with_experts_per_token(1).with_d_ff(12).with_router_normalized(false)
        }),
        ("llama with layer norms", llama.with_norm(NormKind::LayerNorm).with_sliding_window(Some(3))),
    ]
}

fn tokens<B: Backend>(batch_size: usize, seq_length: usize, device: &B::Device) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..batch_size * seq_length).map(|at| (at * 31 % 50) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [batch_size, seq_length]), device)
}

backend_test!(cached_decode_equals_the_full_forward_token_by_token::<B>(device) {
    for (name, config) in causal_families() {
        let model: Transformer<B> = config.with_init_deviation(0.3).init(3, &device)?;
        let ids = tokens::<B>(2, 20, &device);
        let width = model.config().d_model;
        let full = model.forward(ids.clone());
        let full = full.into_data().iter::<f32>().collect::<Vec<f32>>();
        let tokens: Vec<u32> = ids.into_data().iter::<i64>().map(|id| id as u32).collect();
        let mut cache = model.cache(2 * 64);
        let rows = [cache.add_row(), cache.add_row()];
        // Prompts of eight and of three, then one token at a time, finally several of one row with
        // one of the other.
        let mut steps = vec![[0..8, 0..3]];
        steps.extend((0..9).map(|at| [8 + at..9 + at, 3 + at..4 + at]));
        steps.push([17..20, 12..13]);
        for step in steps {
            let of = |row: usize| (rows[row], &tokens[20 * row..][step[row].clone()]);
            let hidden = model.prefill(&[of(0), of(1)], &mut cache).states();
            let ends = [0, 1].map(|row| &full[(20 * row + step[row].end - 1) * width..][..width]);
            let ends = Tensor::from_data(TensorData::new(ends.concat(), [2, width]), &device);
            assert_close(&format!("{name}, {step:?}"), &hidden, &ends, tolerance::<B>(&device).times(10.0));
        }
        assert_eq!(rows.map(|row| cache.length(row)), [20, 13]);
    }
});

backend_test!(each_layer_has_its_own_window::<B>(device) {
    let llama = TransformerConfig::llama(50, 24, 32, 2, 4).with_init_deviation(0.3);
    let hidden = |config: TransformerConfig| {
        let model: Transformer<B> = config.init(3, &device).expect("a config that can be built");
        model.forward(tokens::<B>(2, 20, &device))
    };
    let windows = |windows: [usize; 2]| hidden(llama.clone().with_layer_windows(windows.to_vec()));
    // All alike, as with a single setting; and no window.
    assert_close("windows of 4", &windows([4, 4]), &hidden(llama.clone().with_sliding_window(Some(4))), 0.0);
    assert_close("no windows", &windows([0, 0]), &hidden(llama.clone()), 0.0);
    let differ = |a: &Tensor<B, 3>, b: &Tensor<B, 3>| {
        (a.clone() - b.clone()).abs().max().into_data().iter::<f32>().next().expect("a value")
    };
    let all = [windows([4, 0]), windows([0, 4]), windows([4, 4]), windows([0, 0])];
    for (at, a) in all.iter().enumerate() {
        // Up to the fourth token the windows have no effect.
        assert_close("the first tokens", &a.clone().narrow(1, 0, 4), &all[0].clone().narrow(1, 0, 4), 1e-5);
        assert!(all[..at].iter().all(|b| differ(a, b) > 1e-2), "windows {at} are like others");
    }
    // With windows of four in both layers, a token depends on the six before it.
    let model: Transformer<B> = llama.clone().with_layer_windows(vec![4, 4]).init(3, &device)?;
    let ids = tokens::<B>(1, 12, &device);
    let changed = Tensor::cat(vec![ids.clone().narrow(1, 0, 5).add_scalar(1), ids.clone().narrow(1, 5, 7)], 1);
    let [before, after] = [ids.clone(), changed.clone()].map(|ids| model.forward(ids).narrow(1, 11, 1));
    assert_close("a token beyond all windows", &after, &before, tolerance::<B>(&device));
    let model: Transformer<B> = llama.clone().with_layer_windows(vec![4, 0]).init(3, &device)?;
    let [before, after] = [ids, changed].map(|ids| model.forward(ids).narrow(1, 11, 1));
    assert!(differ(&before, &after) > 1e-2, "a layer without a window sees all tokens");
});

backend_test!(a_causal_model_never_looks_ahead::<B>(device) {
    for (name, config) in causal_families() {
        let model: Transformer<B> = config.with_init_deviation(0.3).init(3, &device)?;
        let ids = tokens::<B>(1, 12, &device);
        let changed = Tensor::cat(vec![ids.clone().narrow(1, 0, 7), ids.clone().narrow(1, 7, 5).add_scalar(1)], 1);
        let (before, after) = (model.forward(ids), model.forward(changed));
        assert_close(name, &after.clone().narrow(1, 0, 7), &before.clone().narrow(1, 0, 7), tolerance::<B>(&device));
        let moved = (after - before).narrow(1, 7, 5).abs().max().into_data().iter::<f32>().next().expect("a value");
        assert!(moved > 1e-2, "{name}: the change must be seen from its own place on");
    }
});

backend_test!(a_saved_model_comes_back_the_same::<B>(device) {
    let bert = TransformerConfig::bert(50, 24, 32, 2, 4);
    let modern = TransformerConfig::modernbert(50, 24, 32, 4, 4, 6);
    for (name, config) in causal_families().into_iter().chain([("bert", bert), ("modernbert", modern)]) {
        let folder = tempfile::tempdir().expect("a folder");
        let model: Transformer<B> = config.clone().with_init_deviation(0.3).init(5, &device)?;
        let hub = ModelFolder::new(folder.path());
        hub.save(&model)?;
        let loaded = hub.load::<B>(&device)?;
        assert_eq!(loaded.config(), model.config(), "{name}");
        let ids = tokens::<B>(2, 9, &device);
        assert_close(name, &loaded.forward(ids.clone()), &model.forward(ids), 0.0);
    }
});

backend_test!(rows_of_large_matrices_repeat_where_values_do_not_matter::<B>(device) {
    // Of the embedding, 2^22 values are 65,536 rows.
    let config = TransformerConfig::llama(65_600, 16, 64, 1, 4);
    let [whole, repeated] =
        [config.init::<B>(3, &device)?, config.init_in::<B>(3, burn::tensor::FloatDType::F32, &device)?];
    let rows = |model: &Transformer<B>, first| values(&model.embedding.val().narrow(0, first, 64));
    assert_eq!(rows(&repeated, 65_472), rows(&whole, 65_472));
    assert_eq!(rows(&repeated, 65_536), rows(&whole, 0));
    let up = |model: &Transformer<B>| values(&model.blocks[0].feed_forward.dense().expect("a dense layer").up.base.val());
    assert_eq!(up(&repeated), up(&whole));
});

backend_test!(a_seed_gives_the_same_model_every_time::<B>(device) {
    let config = TransformerConfig::gpt2(50, 24, 32, 2, 4);
    let sum = |seed| -> Result<f32, fireclay::Failure> {
        let model: Transformer<B> = config.init(seed, &device)?;
        let mut data = model.embedding.val().into_data();
        data = data.convert::<f32>();
        Ok(data.iter::<f32>().enumerate().map(|(at, value)| value * (at % 7) as f32).sum())
    };
    assert_eq!(sum(1)?, sum(1)?);
    assert_ne!(sum(1)?, sum(2)?);
});
