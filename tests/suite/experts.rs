//! Mixtures of experts: routing by configuration, the losses of routers, and training.

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay::recipe::Recipe;
use fireclay::training::expert_balance::ExpertBalance;
use fireclay::training::optim::ParameterGradients;
use fireclay::training::{StepFigures, Trainer, read_figures};
use fireclay_kernels::{Backend, Format, HeadLossOptions, backward};
use fireclay_model::{
    Experts, Family, FeedForward, GgufKind, LoraConfig, MatrixDtype, ModelFolder, RouterLosses, RouterScores, Targets,
    Transformer, TransformerConfig, named_parameters,
};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::backend_test;
use crate::chats::{base_and_chats, tune};
use crate::compare::{assert_close, relative_error, tolerance, values};
use crate::skip::skip;

fn mixture() -> TransformerConfig {
    let config = TransformerConfig::mixtral(50, 24, 32, 2, 4).with_n_kv_heads(2).with_d_ff(20);
    config.with_experts(5).with_experts_per_token(2).with_init_deviation(0.3)
}

fn tokens<B: Backend>(batch_size: usize, seq_length: usize, device: &B::Device) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..batch_size * seq_length).map(|at| (at * at * 31 % 50) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [batch_size, seq_length]), device)
}

/// Gives every vector that is zero at first other values, so that biases and sinks matter.
pub(crate) fn with_biases<B: Backend>(model: Transformer<B>) -> Transformer<B> {
    struct Setter;
    impl<B: Backend> ModuleMapper<B> for Setter {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|value| match (D, value.dims().iter().product::<usize>()) {
                (1, size) if values(&value).iter().all(|value| *value == 0.0) => {
                    let own: Vec<f32> = (0..size).map(|at| 0.4 * ((at * 7 % 5) as f32 - 2.0)).collect();
                    Tensor::from_data(TensorData::new(own, value.dims()), &value.device())
                }
                _ => value,
            })
        }
    }
    model.map(&mut Setter)
}

fn experts<B: Backend>(model: &Transformer<B>, layer: usize) -> &Experts<B> {
    model.blocks[layer].feed_forward.experts().expect("a mixture")
}

/// What a mixture computes of `x`, with each router's scores as its configuration says, from basic
/// operations.
fn plain<B: Backend>(own: &Experts<B>, config: &TransformerConfig, x: Tensor<B, 2>) -> Tensor<B, 2> {
    let (n_experts, k) = (config.experts, config.experts_per_token);
    let ([tokens, d_model], d_ff) = (x.dims(), config.d_ff);
    let bias = |bias: &Option<Param<Tensor<B, 1>>>, size: usize, part: usize| {
        bias.as_ref()
            .map_or(Tensor::zeros([1, size], &x.device()), |bias| bias.val().narrow(0, part * size, size).unsqueeze())
    };
    let logits = x.clone().matmul(own.router.val().transpose()) + bias(&own.router_bias, n_experts, 0);
    let scores = match config.router {
        RouterScores::Softmax => softmax(logits, 1),
        RouterScores::Sigmoid => sigmoid(logits),
    };
    let (scores, choice) = (values(&scores), values(&(scores.clone() + bias(&own.choice_bias, n_experts, 0))));
    let mut weights = vec![0.0; tokens * n_experts];
    for (row, (scores, choice)) in
        weights.chunks_mut(n_experts).zip(scores.chunks(n_experts).zip(choice.chunks(n_experts)))
    {
        let mut order: Vec<usize> = (0..n_experts).collect();
        order.sort_by(|a, b| choice[*b].total_cmp(&choice[*a]));
        let sum: f32 = order[..k].iter().map(|expert| scores[*expert]).sum();
        for expert in &order[..k] {
            row[*expert] =
                scores[*expert] / if config.router_normalized { sum } else { 1.0 } * config.expert_scale as f32;
        }
    }
    let weights = Tensor::<B, 2>::from_data(TensorData::new(weights, [tokens, n_experts]), &x.device());
    let dense =
        |x: &Tensor<B, 2>, up: Tensor<B, 2>, up_bias: Tensor<B, 2>, down: Tensor<B, 2>, down_bias: Tensor<B, 2>| {
            let inner = x.clone().matmul(up.transpose()) + up_bias;
            let half = inner.dims()[1] / 2;
            let hidden = match config.gated {
                true => {
                    let [gate, up] = [0, half].map(|first| inner.clone().narrow(1, first, half));
                    gate.clone() * sigmoid(gate) * up
                }
                false => burn::tensor::activation::relu(inner),
            };
            hidden.matmul(down.transpose()) + down_bias
        };
    let width = config.up_width();
    let mut sum = match &own.shared {
        Some(shared) => {
            let d_ff = config.shared_d_ff;
            let width = if config.gated { 2 * d_ff } else { d_ff };
            let biases = (bias(&shared.up_bias, width, 0), bias(&shared.down_bias, d_model, 0));
            dense(&x, shared.up.base.val(), biases.0, shared.down.base.val(), biases.1)
        }
        None => x.zeros_like(),
    };
    for expert in 0..n_experts {
        let up = own.up.val().narrow(0, expert * width, width);
        let down = own.down.val().narrow(0, expert * d_model, d_model);
        let biases = (bias(&own.up_bias, width, expert), bias(&own.down_bias, d_model, expert));
        let output = dense(&x, up, biases.0, down, biases.1);
        assert_eq!(own.down.dims()[1], d_ff);
        sum = sum + output * weights.clone().narrow(1, expert, 1);
    }
    sum
}

backend_test!(a_router_scores_chooses_and_weighs_as_its_configuration_says::<B>(device) {
    let base = TransformerConfig::llama(50, 24, 32, 1, 4).with_d_ff(12).with_experts(6).with_experts_per_token(3);
    let plain_gpt2 = TransformerConfig::gpt2(50, 24, 32, 1, 4).with_activation(fireclay_model::ActivationKind::Relu);
    let gpt2 = plain_gpt2.with_d_ff(12).with_experts(4).with_experts_per_token(2);
    let cases = [
        base.clone(),
        base.clone().with_router_normalized(false),
        base.clone().with_router(RouterScores::Sigmoid),
        base.clone().with_router(RouterScores::Sigmoid).with_router_normalized(false).with_expert_scale(2.5),
        base.clone().with_router(RouterScores::Sigmoid).with_choice_bias(true).with_router_bias(true),
        base.clone().with_choice_bias(true).with_shared_d_ff(7),
        gpt2.clone().with_router_bias(true).with_shared_d_ff(9),
        gpt2.with_experts_per_token(4).with_router_normalized(false),
    ];
    for config in cases {
        let mut model = with_biases(config.clone().with_init_deviation(0.4).init::<B>(3, &device)?);
        // Norms and attention contribute nothing: only the mixture changes the residual stream.
        for block in &mut model.blocks {
            block.attention.output = fireclay_model::Matrix::from(Param::from_tensor(Tensor::zeros([32, 32], &device))).into();
            block.attention.output_bias = None;
        }
        let ids = tokens::<B>(1, 19, &device);
        let inspected = model.inspect(ids);
        let [before, after] = [0, 1].map(|at| inspected.residual[at].clone().reshape([19, 32]));
        let normed = fireclay_kernels::norm(before.clone(), &model.blocks[0].feed_forward_norm.weights());
        let wanted = plain(experts(&model, 0), &config, normed);
        let tolerance = tolerance::<B>(&device).times(3.0);
        assert_close(&format!("{config:?}"), &(after - before), &wanted, tolerance);
    }
});

/// The loss that training descends: cross entropy, and the losses of routers with their factors.
fn total<B: Backend>(model: &Transformer<B>, losses: RouterLosses, device: &B::Device) -> f64 {
    let mut model = model.clone();
    model.set_router_losses(Some(losses));
    let (hidden, routing) = model.forward_routed(tokens::<B>(2, 12, device));
    let routing = routing.expect("two layers with experts");
    let loss = model.loss(hidden, tokens::<B>(2, 12, device), HeadLossOptions::new());
    let number = |x: &Tensor<B, 1>| f64::from(values(x)[0]);
    number(&loss) + 2.0 * (losses.balance * number(&routing.balance) + losses.z * number(&routing.z))
}

backend_test!(router_losses_have_the_gradients_of_losses_that_are_added::<B>(device) {
    for config in [
        mixture(),
        mixture().with_router(RouterScores::Sigmoid).with_router_bias(true),
        mixture().with_router_normalized(false),
    ] {
        let model: Transformer<Autodiff<B>> = config.init(3, &device)?;
        for losses in [RouterLosses { balance: 0.7, z: 0.0 }, RouterLosses { balance: 0.0, z: 0.2 }] {
            let gradients = |losses: Option<RouterLosses>| {
                let mut model = model.clone();
                model.set_router_losses(losses);
                let hidden = model.forward(tokens::<Autodiff<B>>(2, 12, &device));
                let loss = model.loss(hidden, tokens::<Autodiff<B>>(2, 12, &device), HeadLossOptions::new());
                ParameterGradients::take(&model, backward(loss, None)).into_inner()
            };
            let (with, without) = (gradients(Some(losses)), gradients(None));
            let zero = gradients(Some(RouterLosses::default()));
            let names: Vec<String> = named_parameters(&model).into_iter().map(|(path, ..)| path).collect();
            for ((with, without), zero) in with.iter().zip(&without).zip(&zero) {
                let (Some(_), Some(without), Some(zero)) = (with, without, zero) else { panic!("a gradient for all") };
                assert_eq!(values(without), values(zero), "factors of 0 change nothing");
            }
            // Along the difference of gradients, the loss changes as they say.
            let at = names.iter().position(|name| name.ends_with("experts.router")).expect("a router");
            let [with, without] = [&with, &without].map(|all| values(all[at].as_ref().expect("a gradient")));
            let direction: Vec<f32> = with.iter().zip(&without).map(|(a, b)| a - b).collect();
            let length = direction.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            assert!(length > 1e-3, "the losses of routers have gradients: {length}");
            let moved = |by: f64| {
                let mut moved = burn::module::AutodiffModule::valid(&model);
                let FeedForward::Experts(own) = &mut moved.blocks[0].feed_forward else { panic!("a mixture") };
                let shape = own.router.val().dims();
                let step: Vec<f32> = direction.iter().map(|x| (by * f64::from(*x) / length) as f32).collect();
                let step = Tensor::from_data(TensorData::new(step, shape), &device);
                own.router = Param::from_tensor(own.router.val() + step);
                moved
            };
            let by = 2e-3;
            let slope = |losses: RouterLosses| {
                let [up, down] = [by, -by].map(|by| total(&moved(by), losses, &device));
                (up - down) / (2.0 * by)
            };
            let (ours, wanted) = (length, slope(losses) - slope(RouterLosses::default()));
            assert!((ours / wanted - 1.0).abs() < 0.03, "{losses:?}: a slope of {ours}, and of {wanted}");
        }
    }
});

backend_test!(recomputed_blocks_have_the_same_gradients_and_count_no_token_twice::<B>(device) {
    let config = TransformerConfig { n_layers: 4, ..mixture() };
    let mut model: Transformer<Autodiff<B>> = config.init(3, &device)?;
    model.set_router_losses(Some(RouterLosses { balance: 0.5, z: 0.1 }));
    let ids = || tokens::<Autodiff<B>>(2, 12, &device);
    let (hidden, routing) = model.forward_routed(ids());
    let wanted_loads = values(&routing.expect("four layers with experts").loads.inner());
    let loss = model.loss(hidden, ids(), HeadLossOptions::new());
    let wanted = ParameterGradients::take(&model, backward(loss, None)).into_inner();
    for every in [1, 2, 3] {
        let (hidden, mut kept) = model.forward_with_checkpoints(ids(), every);
        let loads = values(&kept.take_routing().expect("four layers with experts").loads.inner());
        assert_eq!(loads, wanted_loads, "every {every} blocks");
        assert_eq!(loads.iter().sum::<f32>(), (4 * 2 * 12 * 2) as f32, "each token twice, in each layer");
        let loss = model.loss(hidden, ids(), HeadLossOptions::new());
        let ours = ParameterGradients::take(&model, model.backward(loss, kept, None, || ())).into_inner();
        for (ours, wanted) in ours.iter().zip(&wanted) {
            let [ours, wanted] = [ours, wanted].map(|gradient| values(gradient.as_ref().expect("a gradient")));
            let error = relative_error(&ours, &wanted);
            assert!(error < tolerance::<B>(&device).relative, "every {every} blocks: {error:.1e}");
        }
    }
});

fn recipe(settings: &[(&str, &str)]) -> Recipe {
    let recipe = Recipe::shipped("stories").expect("the default recipe");
    let small = [
        ("d_model", "32"),
        ("batch_size", "8"),
        ("seq_length", "64"),
        ("warmup_steps", "5"),
        ("experts", "8"),
        ("experts_per_token", "2"),
        ("d_ff", "16"),
    ];
    recipe.with_all(small.iter().chain(settings).copied()).expect("known settings")
}

backend_test!(a_mixture_learns_and_the_balance_loss_gives_every_expert_its_share::<B>(device) {
    let steps = if B::is_synchronous() { 150 } else { 40 };
    let run = |balance: &str| {
        let recipe = recipe(&[("balance_loss", balance), ("steps", "150"), ("learning_rate", "4e-3")]);
        let mut trainer = Trainer::<B>::new(&recipe, recipe.task().expect("the stories"), device.clone()).expect("a trainer");
        let outputs: Vec<_> = (0..steps).map(|_| trainer.train_step().expect("in memory")).collect();
        read_figures(&outputs).expect("figures")
    };
    let (balanced, not) = (run("0.05"), run("0"));
    let (first, last) = (balanced[0].loss, balanced[steps - 1].loss);
    assert!(last < 0.7 * first, "it learns: {first}, then {last}");
    let mean = |figures: &[StepFigures], of: fn(ExpertBalance) -> f64| {
        let last = &figures[steps - 10..];
        last.iter().map(|step| of(step.experts.expect("experts"))).sum::<f64>() / last.len() as f64
    };
    let [even, uneven] = [&balanced, &not].map(|run| mean(run, |balance| balance.balance_loss));
    assert!(even >= 0.99 && even < uneven, "with the loss {even}, without {uneven}");
    let [least, most] = [mean(&balanced, |balance| balance.least_load), mean(&balanced, |balance| balance.most_load)];
    assert!(least > 0.25 && most < 4.0, "loads from {least} to {most} of an even share");
    assert!(least > mean(&not, |balance| balance.least_load), "the loss raises the least load");
});

backend_test!(figures_of_experts_do_not_depend_on_the_split_of_a_batch::<B>(device) {
    let run = |accumulation: &str, batch_size: &str| {
        let settings = [("accumulation", accumulation), ("batch_size", batch_size), ("checkpoint_activations", "1")];
        let recipe = recipe(&settings);
        let mut trainer = Trainer::<B>::new(&recipe, recipe.task().expect("the stories"), device.clone()).expect("a trainer");
        let outputs = [trainer.train_step().expect("in memory")];
        read_figures(&outputs).expect("figures")[0].experts.expect("experts")
    };
    let (large, small) = (run("1", "8"), run("4", "2"));
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
    assert!(near(large.least_load, small.least_load) && near(large.most_load, small.most_load), "{large:?}, {small:?}");
    assert!(near(large.z_loss, small.z_loss), "{large:?}, {small:?}");
});

backend_test!(what_has_no_experts_refuses_them_by_name::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let files = ModelFolder::new(folder.path());
    let model: Transformer<B> = mixture().init(3, &device)?;
    files.save(&model)?;
    assert_eq!(files.config()?.0, Family::Mixtral);
    let out = folder.path().join("model.gguf");
    let refused = files.export_gguf::<B>(GgufKind::F32, &[], &out, &mut |_, _| {}, &device).expect_err("no GGUF");
    assert!(refused.to_string().contains("experts is 5: a mixture of experts, which GGUF cannot express"), "{refused}");
    assert!(!out.exists());
    for target in ["w1", "block_sparse_moe.experts.2.w2", "gate"] {
        let config = LoraConfig { targets: Targets::Names(vec!["q_proj".into(), target.into()]), ..LoraConfig::default() };
        let refused = model.clone().with_lora(Family::Mixtral, &config, None, 1).expect_err("no adapter on experts");
        assert!(refused.contains("mixture of experts, which takes no adapter") && refused.contains(target), "{refused}");
    }
    let config = LoraConfig { targets: Targets::AllLinear, ..LoraConfig::default() };
    let adapted = model.clone().with_lora(Family::Mixtral, &config, None, 1).expect("attention takes adapters");
    let adapters: Vec<String> = named_parameters(&adapted)
        .into_iter()
        .map(|(path, ..)| path)
        .filter(|path| path.contains(".adapter."))
        .collect();
    assert!(adapters.len() == 8 && adapters.iter().all(|path| path.contains(".attention.")), "{adapters:?}");
});

/// The values of E2M1 by their codes.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

backend_test!(experts_stored_in_mxfp4_are_those_of_the_same_floats::<B>(device) {
    let config = TransformerConfig::gpt_oss(50, 24, 32, 1, 4, 5).with_d_ff(64).with_experts(3).with_experts_per_token(2);
    let model: Transformer<B> = with_biases(config.with_init_deviation(0.2).init(3, &device)?);
    let [floats, packed] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    ModelFolder::new(floats.path()).save(&model)?;
    let bytes = std::fs::read(floats.path().join("model.safetensors")).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let (mut own, mut stored): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for (name, view) in file.tensors() {
        let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        let is_matrix = name.ends_with("gate_up_proj") || name.ends_with("down_proj");
        if !is_matrix {
            own.push((name.clone(), tensor.clone()));
            stored.push((name, tensor));
            continue;
        }
        // [experts, rows, columns] in codes, and [experts, columns, rows] in floats.
        let [experts, columns, rows] = view.shape()[..] else { panic!("stacked matrices: {:?}", view.shape()) };
        let at = |expert: usize, row: usize, column: usize| ((expert * 31 + row) * 57 + column * 11 + column * row) % 16;
        let exponent = |expert: usize, row: usize, block: usize| 123 + (expert + 2 * row + block) % 5;
        let (mut blocks, mut exponents, mut values) = (Vec::new(), Vec::new(), vec![0f32; experts * rows * columns]);
        for expert in 0..experts {
            for row in 0..rows {
                for block in 0..columns / 32 {
                    exponents.push(exponent(expert, row, block) as u8);
                    let code = |place: usize| at(expert, row, 32 * block + place) as u8;
                    blocks.extend((0..16).map(|pair| code(2 * pair) | code(2 * pair + 1) << 4));
                    for place in 0..32 {
                        let sign = if code(place) < 8 { 1.0 } else { -1.0 };
                        let value = sign * E2M1[usize::from(code(place) % 8)];
                        let scale = 2f32.powi(exponent(expert, row, block) as i32 - 127);
                        values[(expert * columns + 32 * block + place) * rows + row] = value * scale;
                    }
                }
            }
        }
        let values = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        own.push((name.clone(), (Dtype::F32, vec![experts, columns, rows], values)));
        stored.push((format!("{name}_blocks"), (Dtype::U8, vec![experts, rows, columns / 32, 16], blocks)));
        stored.push((format!("{name}_scales"), (Dtype::U8, vec![experts, rows, columns / 32], exponents)));
    }
    let json = std::fs::read_to_string(floats.path().join("config.json")).expect("a file");
    let mut json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    for (folder, tensors) in [(&floats, &own), (&packed, &stored)] {
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("as many bytes as the shape says"))
        });
        let bytes = safetensors::serialize(views, None).expect("a safetensors file");
        std::fs::write(folder.path().join("model.safetensors"), bytes).expect("a writable folder");
    }
    json["quantization_config"] = serde_json::json!({ "quant_method": "mxfp4" });
    std::fs::write(packed.path().join("config.json"), json.to_string()).expect("a writable folder");

    let ids = tokens::<B>(2, 9, &device);
    let logits = |folder: &tempfile::TempDir, dtype: MatrixDtype| {
        let model = ModelFolder::new(folder.path()).load_in::<B>(dtype, &mut |_, _| {}, &device).expect("a model");
        model.logits(model.forward(ids.clone()))
    };
    let f32 = MatrixDtype::Float(FloatDType::F32);
    let wanted = logits(&floats, f32);
    assert_close("MXFP4 as floats", &logits(&packed, f32), &wanted, 0.0);
    assert_close("MXFP4 as stored", &logits(&packed, MatrixDtype::Stored), &wanted, tolerance::<B>(&device).times(3.0));
});

backend_test!(quantized_experts_are_near_the_floats::<B>(device) {
    let config = mixture().with_d_ff(64).with_init_deviation(0.1);
    let model: Transformer<B> = config.init(3, &device)?;
    let ids = tokens::<B>(2, 9, &device);
    let floats = model.logits(model.forward(ids.clone()));
    let mut quantized = model.clone().with_quantized_matrices(Format::Int8).expect("a working device");
    assert!(quantized.is_quantized());
    let formats = quantized.formats();
    let stacked: Vec<_> = formats.iter().filter(|(path, _)| path.contains(".experts.")).collect();
    assert!(stacked.len() == 4 && stacked.iter().all(|(_, format)| *format == Some(Format::Int8)), "{formats:?}");
    let ours = quantized.logits(quantized.forward(ids));
    let error = relative_error(&values(&ours), &values(&floats));
    assert!(error > 1e-5 && error < 0.03, "INT8 differs by {error}");
});

backend_test!(activations_of_half_precision_choose_by_f32_scores::<B>(device) {
    if !B::supports_dtype(&device, DType::BF16) {
        skip("the device has no bf16");
        return Ok(());
    }
    let model: Transformer<B> = mixture().with_init_deviation(0.1).init(3, &device)?;
    let ids = tokens::<B>(2, 9, &device);
    let floats = model.logits(model.forward(ids.clone()));
    let halves = model.with_activations(FloatDType::BF16).with_copies();
    let ours = halves.logits(halves.forward(ids)).cast(DType::F32);
    let error = relative_error(&values(&ours), &values(&floats));
    assert!(error < 0.05, "bf16 differs by {error}");
});

#[test]
fn losses_of_routers_are_refused_with_a_model_that_has_none() {
    let folder = tempfile::tempdir().expect("a folder");
    base_and_chats(folder.path());
    let refused = tune(folder.path(), "run", &["adapter=none", "balance_loss=0.1", "steps=1"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("training.balance_loss has no effect") && said.contains("no experts"), "{said}");
}
