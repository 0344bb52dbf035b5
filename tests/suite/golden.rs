//! Comparison with PyTorch and transformers: see `tests/golden/make.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::tensor::{Int, Tensor, TensorData};
use fireclay::inference::scoring::{Pair, ScoreHead};
use fireclay::recipe::schema::OptimizerKind;
use fireclay::recipe::{Schedule, ScheduleKind};
use fireclay::training::optim::{Optimizer, ParameterGradients, Settings};
use fireclay_datasets::Tokenizer;
use fireclay_kernels::{
    Activation, ActivationKind, AttentionMask, AttentionOptions, Backend, HeadLossOptions, Norm, RotaryTable, activate,
    attention, head_loss, norm, rotary,
};
use fireclay_model::{ModelFolder, Tokens, Transformer};
use safetensors::tensor::{Dtype, SafeTensors};

use crate::backend_test;
use crate::compare::{Tolerance, difference, tolerance, values};

pub(crate) fn folder(name: &str) -> PathBuf {
    // A test binary may run on another machine, from the project's root.
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let root = if built.exists() { built } else { PathBuf::from("tests/golden") };
    root.join(name)
}

/// The tensors of a file as f32, integers included.
pub(crate) fn read(path: &Path) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).expect("a golden file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let word = |b: &[u8]| [b[0], b[1], b[2], b[3]];
        let values = view.data().chunks_exact(4).map(|b| match view.dtype() {
            Dtype::F32 => f32::from_le_bytes(word(b)),
            Dtype::I32 => i32::from_le_bytes(word(b)) as f32,
            other => panic!("{name} has dtype {other:?}"),
        });
        let values = values.collect();
        (name, (view.shape().to_vec(), values))
    });
    tensors.collect()
}

/// A golden file, with its tensors on a device.
pub(crate) struct Golden(HashMap<String, (Vec<usize>, Vec<f32>)>);

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        Self(read(&folder(name)))
    }

    pub(crate) fn values(&self, name: &str) -> &[f32] {
        &self.0.get(name).unwrap_or_else(|| panic!("no golden {name}")).1
    }

    /// How many tensors have names that begin so.
    pub(crate) fn count(&self, prefix: &str) -> usize {
        self.0.keys().filter(|key| key.starts_with(prefix)).count()
    }

    pub(crate) fn int<B: Backend, const D: usize>(&self, name: &str, device: &B::Device) -> Tensor<B, D, Int> {
        let (shape, values) = &self.0[name];
        let values: Vec<i32> = values.iter().map(|value| *value as i32).collect();
        Tensor::from_data(TensorData::new(values, shape.clone()), device)
    }

    #[track_caller]
    fn assert<B: Backend, const D: usize>(&self, name: &str, tensor: &Tensor<B, D>, tolerance: impl Into<Tolerance>) {
        self.assert_values(name, &values(tensor), tolerance.into());
    }

    #[track_caller]
    pub(crate) fn assert_values(&self, name: &str, ours: &[f32], tolerance: Tolerance) {
        let (shape, wanted) = self.0.get(name).unwrap_or_else(|| panic!("no golden {name}"));
        let difference = difference(ours, wanted, shape.last().copied().unwrap_or(1), tolerance);
        assert!(difference.is_none(), "{name}: {}", difference.unwrap_or_default());
    }
}

/// Checks that the largest difference is within f32 rounding; where sums have another order than on
/// the CPU, Adam may amplify a gradient that is only rounding.
#[track_caller]
pub(crate) fn assert_near<B: Backend>(what: &str, ours: &[f32], golden: &[f32], bound: f32, device: &B::Device) {
    let bound = if B::name(device).contains("cuda") { bound * 200.0 } else { bound };
    let distances = ours.iter().zip(golden).map(|(a, b)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() });
    let largest = distances.fold(0.0, f32::max);
    assert_eq!(ours.len(), golden.len(), "{what}");
    assert!(largest <= bound, "{what}: off by {largest:.2e}, more than {bound:.0e}");
}

backend_test!(operations_match_pytorch::<B>(device) {
    let golden = Golden::open("ops.safetensors");
    let tolerance = tolerance::<B>(&device);
    type A<B> = Autodiff<B>;
    // The output against the golden one, then each input's gradient under the given name.
    let check = |case: &str, output: &str, value: Tensor<A<B>, 1>, inputs: &[(&str, Tensor<A<B>, 1>)]| {
        golden.assert::<B, 1>(&format!("{case}.{output}"), &value.clone().inner(), tolerance);
        let upstream = golden.values(&format!("{case}.grad_output"));
        let upstream = Tensor::<A<B>, 1>::from_data(upstream, &device);
        let gradients = (value * upstream).sum().backward();
        for (name, input) in inputs {
            let gradient = input.grad(&gradients).expect("a gradient");
            golden.assert::<B, 1>(&format!("{case}.d_{name}"), &gradient, tolerance);
        }
    };
    // A flattened input, so that all fit in one list, with its shape.
    let input = |case: &str, name: &str| {
        let (shape, values) = &golden.0[&format!("{case}.{name}")];
        (Tensor::<A<B>, 1>::from_data(values.as_slice(), &device).require_grad(), shape.clone())
    };
    fn shaped<B: Backend, const D: usize>(input: &(Tensor<Autodiff<B>, 1>, Vec<usize>)) -> Tensor<Autodiff<B>, D> {
        let shape: [usize; D] = input.1.clone().try_into().expect("the golden's rank");
        input.0.clone().reshape(shape)
    }

    let [x, gamma, beta] = ["x", "gamma", "beta"].map(|name| input("layer_norm", name));
    let y = norm(shaped::<B, 3>(&x), &Norm::layer(gamma.0.clone(), Some(beta.0.clone()), 1e-5));
    check("layer_norm", "output", y.flatten(0, 2), &[("x", x.0), ("gamma", gamma.0), ("beta", beta.0)]);
    let [x, gamma] = ["x", "gamma"].map(|name| input("rms_norm", name));
    let y = norm(shaped::<B, 3>(&x), &Norm::rms(gamma.0.clone(), 1e-6));
    check("rms_norm", "output", y.flatten(0, 2), &[("x", x.0), ("gamma", gamma.0)]);

    let lengths = golden.int::<A<B>, 1>("attention_lengths.lengths", &device);
    for (case, mask) in [
        ("attention_causal", AttentionMask::Causal { window: None }),
        ("attention_window", AttentionMask::Causal { window: Some(3) }),
        ("attention_lengths", AttentionMask::Lengths(lengths)),
    ] {
        let [q, k, v] = ["q", "k", "v"].map(|name| input(case, name));
        let y = attention(shaped(&q), shaped(&k), shaped(&v), &mask, AttentionOptions::new(8));
        check(case, "output", y.flatten(0, 2), &[("q", q.0), ("k", k.0), ("v", v.0)]);
    }

    for (case, kind) in [
        ("gelu_erf", ActivationKind::GeluErf),
        ("gelu_tanh", ActivationKind::GeluTanh),
        ("relu", ActivationKind::Relu),
        ("silu", ActivationKind::Silu),
    ] {
        let x = input(case, "x");
        let y = activate(shaped::<B, 2>(&x), Activation::plain(kind));
        check(case, "output", y.flatten(0, 1), &[("x", x.0)]);
    }
    let x = input("swiglu", "gate_up");
    let y = activate(shaped::<B, 3>(&x), Activation::gated(ActivationKind::Silu));
    check("swiglu", "output", y.flatten(0, 2), &[("gate_up", x.0)]);

    let x = input("rotary", "x");
    let frequencies: Vec<f64> = (0..4).map(|pair| 10_000f64.powf(-2.0 * f64::from(pair) / 8.0)).collect();
    let table = RotaryTable::<A<B>>::new(32, &frequencies, 1.0, &device);
    let y = rotary(shaped::<B, 4>(&x), &table, golden.int("rotary.positions", &device));
    check("rotary", "output", y.flatten(0, 3), &[("x", x.0)]);

    for (case, smoothing) in [("head_loss", 0.1), ("head_loss_plain", 0.0)] {
        let [hidden, weight] = ["hidden", "weight"].map(|name| input(case, name));
        let targets = golden.int::<A<B>, 1>(&format!("{case}.targets"), &device);
        let options = HeadLossOptions::new().with_label_smoothing(smoothing).with_chunk(4);
        let loss = head_loss(shaped::<B, 2>(&hidden), shaped::<B, 2>(&weight), targets, options);
        check(case, "loss", loss, &[("hidden", hidden.0), ("weight", weight.0)]);
    }
});

backend_test!(logits_of_every_causal_family_match_transformers::<B>(device) {
    for name in ["gpt2", "llama", "mistral", "qwen2", "qwen3", "llama3", "llama_linear", "llama_yarn"] {
        let golden = Golden::open(&format!("{name}/golden.safetensors"));
        let model = ModelFolder::new(folder(name)).load::<B>(&device)?;
        let logits = model.logits(model.forward(golden.int::<B, 2>("tokens", &device)));
        assert_near::<B>(name, &values(&logits), golden.values("logits"), 1e-5, &device);
    }
});

backend_test!(hidden_states_of_bert_match_transformers::<B>(device) {
    let golden = Golden::open("bert/golden.safetensors");
    let model = ModelFolder::new(folder("bert")).load::<B>(&device)?;
    let tokens = Tokens::from(golden.int::<B, 2>("tokens", &device))
        .with_types(golden.int("token_types", &device))
        .with_lengths(golden.int("lengths", &device));
    let hidden = model.forward(tokens);
    assert_near::<B>("bert", &values(&hidden), golden.values("hidden"), 1e-5, &device);
});

backend_test!(scores_of_pairs_match_transformers::<B>(device) {
    let folder = folder("cross_encoder");
    let golden = std::fs::read_to_string(folder.join("scores.json")).expect("the golden");
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json")).expect("a tokenizer");
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_string();
    let pairs = golden["pairs"].as_array().expect("pairs").iter();
    let pairs: Vec<Pair> =
        pairs.map(|pair| tokenizer.encode_pair(&text(&pair[0]), &text(&pair[1])).expect("tokens")).collect();
    let model = ModelFolder::new(&folder).load::<B>(&device)?;
    let head = ScoreHead::of(&model, &folder)?.expect("a head of one class");
    let scores = head.scores(&model, &pairs)?;
    let wanted: Vec<f32> = golden["scores"]
        .as_array()
        .expect("numbers")
        .iter()
        .map(|score| score.as_f64().expect("a number") as f32)
        .collect();
    assert_near::<B>("cross_encoder", &scores, &wanted, 1e-5, &device);
    let bert = crate::golden::folder("bert");
    assert!(ScoreHead::of(&ModelFolder::new(&bert).load::<B>(&device)?, &bert)?.is_none());
});

/// A model with other parameter values, in order: saving it gives gradients the hub's names.
pub(crate) fn with_values<B: Backend>(model: Transformer<B>, new: Vec<Option<Tensor<B, 1>>>) -> Transformer<B> {
    struct Filler<B: Backend>(std::vec::IntoIter<Option<Tensor<B, 1>>>);
    impl<B: Backend> ModuleMapper<B> for Filler<B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let value = self.0.next().flatten().expect("a value for every parameter");
            param.map(|old| value.reshape(old.shape()))
        }
    }
    model.map(&mut Filler(new.into_iter()))
}

/// A model's parameters under the names of the hub.
pub(crate) fn by_hub_name<B: Backend>(model: &Transformer<B>) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let folder = tempfile::tempdir().expect("a folder");
    ModelFolder::new(folder.path()).save(model).expect("a writable folder");
    read(&folder.path().join("model.safetensors"))
}

/// Loss, every gradient, ten training losses and the parameters after them.
fn trains_as_pytorch<B: Backend>(name: &str, device: &B::Device) {
    let golden = Golden::open(&format!("{name}/golden.safetensors"));
    let mut model = ModelFolder::new(folder(name)).load::<Autodiff<B>>(device).expect("a golden model");
    let loss_of = |model: &Transformer<Autodiff<B>>, tokens: Tensor<Autodiff<B>, 2, Int>, targets| {
        model.loss(model.forward(tokens), targets, HeadLossOptions::new())
    };
    let loss = loss_of(&model, golden.int("tokens", device), golden.int("targets", device));
    assert_near::<B>("loss", &values(&loss.clone().inner()), golden.values("loss"), 1e-5, device);
    let gradients = ParameterGradients::take(&model, loss.backward()).into_inner();
    let gradients = by_hub_name(&with_values(model.valid(), gradients));
    let names: Vec<&str> = golden.0.keys().filter_map(|key| key.strip_prefix("grad.")).collect();
    assert_eq!(names.len(), gradients.len(), "{name}: as many gradients as parameters");
    for key in &names {
        golden.assert_values(&format!("grad.{key}"), &gradients[*key].1, tolerance::<B>(device));
    }

    let settings = std::fs::read_to_string(folder(name).join("training.json")).expect("a golden file");
    let settings: serde_json::Value = serde_json::from_str(&settings).expect("JSON");
    let number = |key: &str| settings[key].as_f64().unwrap_or_else(|| panic!("no {key}"));
    let steps = number("steps") as usize;
    let schedule = Schedule {
        kind: ScheduleKind::Cosine,
        maximum: number("max_learning_rate"),
        minimum: number("min_learning_rate"),
        decay_steps: 0,
        warmup_steps: number("warmup_steps") as u64,
        steps: steps as u64,
    };
    let mut optimizer = Optimizer::new(OptimizerKind::AdamW, &model);
    let (mut losses, mut norms, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    let tokens = golden.int::<Autodiff<B>, 3>("train_tokens", device);
    let targets = golden.int::<Autodiff<B>, 3>("train_targets", device);
    for step in 0..steps {
        let at = |x: &Tensor<Autodiff<B>, 3, Int>| x.clone().narrow(0, step, 1).squeeze_dim::<2>(0);
        let loss = loss_of(&model, at(&tokens), at(&targets));
        let gradients = ParameterGradients::take(&model, loss.backward());
        let settings = Settings {
            learning_rate: schedule.learning_rate(step as u64),
            beta_1: number("beta1"),
            beta_2: number("beta2"),
            epsilon: number("eps"),
            weight_decay: number("weight_decay"),
            max_grad_norm: Some(number("max_grad_norm")),
            step: 0,
        };
        let norm;
        (model, norm) = optimizer.step(model, gradients, settings);
        losses.extend(values(&loss.inner()));
        norms.extend(values(&norm));
        rates.push(settings.learning_rate as f32);
    }
    let check = |what: &str, ours: &[f32], bound| {
        assert_near::<B>(&format!("{name}: {what}"), ours, golden.values(what), bound, device);
    };
    check("train_learning_rates", &rates, 1e-8);
    check("train_losses", &losses, 2e-5);
    check("train_grad_norms", &norms, 2e-5);
    for (key, (_, ours)) in by_hub_name(&model.valid()) {
        let wanted = golden.values(&format!("after.{key}"));
        // The gradient of a key's bias is only rounding, which Adam amplifies to a full step.
        let keys = if name == "gpt2" && key.ends_with("c_attn.bias") { 24..48 } else { 0..0 };
        let kept = |values: &[f32]| -> Vec<f32> {
            values.iter().enumerate().filter(|(at, _)| !keys.contains(at)).map(|(_, value)| *value).collect()
        };
        assert_near::<B>(&format!("{name}: {key} after training"), &kept(&ours), &kept(wanted), 2e-5, device);
    }
}

backend_test!(gpt2_trains_as_in_pytorch::<B>(device) {
    trains_as_pytorch::<B>("gpt2", &device);
});

backend_test!(llama_trains_as_in_pytorch::<B>(device) {
    trains_as_pytorch::<B>("llama", &device);
});
