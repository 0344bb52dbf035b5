//! Checkpoints in the hub's layout: loading, evaluation, chat.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{FloatDType, Int, Tensor, activation};
use fireclay::inference::chat::{ChatTemplate, Conversation};
use fireclay::inference::evaluation::EvaluationRun;
use fireclay::inference::generation::{GenerationOptions, Generator};
use fireclay::precision::Precision;
use fireclay_datasets::{Tokenizer, TokenizerKind};
use fireclay_kernels::{Backend, Penalties};
use fireclay_model::{ModelFolder, Transformer, TransformerConfig};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::backend_test;
use crate::compare::{assert_close, values};
use crate::skip::skip;

/// A tensor's dtype, shape and bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

fn stored(path: &Path) -> HashMap<String, Stored> {
    let bytes = std::fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let own = |view: &TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    file.tensors().into_iter().map(|(name, view)| (name, own(&view))).collect()
}

fn store(path: &Path, tensors: &HashMap<String, Stored>) {
    let view = |(dtype, shape, bytes): &Stored| TensorView::new(*dtype, shape.clone(), bytes).is_ok();
    assert!(tensors.values().all(view));
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("as many bytes as the shape says"))
    });
    let bytes = safetensors::serialize(views, None).expect("a safetensors file");
    std::fs::write(path, bytes).expect("a writable folder");
}

/// A folder with a small model, and the model.
fn folder_of<B: Backend>(config: &TransformerConfig, device: &B::Device) -> (tempfile::TempDir, Transformer<B>) {
    let folder = tempfile::tempdir().expect("a folder");
    let model: Transformer<B> = config.clone().with_init_deviation(0.3).init(5, device).expect("a good config");
    ModelFolder::new(folder.path()).save(&model).expect("a writable folder");
    (folder, model)
}

fn ids<B: Backend>(device: &B::Device) -> Tensor<B, 2, Int> {
    Tensor::from_ints([[3, 1, 4, 1, 5, 9, 2, 6]], device)
}

const WEIGHTS: &str = "model.safetensors";

backend_test!(a_checkpoint_in_several_files_is_the_same_model::<B>(device) {
    for config in [TransformerConfig::gpt2(50, 24, 32, 2, 4), TransformerConfig::qwen3(50, 24, 32, 2, 4, 10)] {
        let (folder, model) = folder_of::<B>(&config, &device);
        let whole = stored(&folder.path().join(WEIGHTS));
        std::fs::remove_file(folder.path().join(WEIGHTS)).expect("removable");
        let mut map = serde_json::Map::new();
        for part in 0..3 {
            let file = format!("model-{part}.safetensors");
            let own = whole.iter().filter(|(name, _)| name.len() % 3 == part).map(|(k, v)| (k.clone(), v.clone()));
            let own: HashMap<String, Stored> = own.collect();
            assert!(!own.is_empty());
            map.extend(own.keys().map(|name| (name.clone(), file.clone().into())));
            store(&folder.path().join(file), &own);
        }
        let index = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
        std::fs::write(folder.path().join("model.safetensors.index.json"), index).expect("writable");
        let loaded = ModelFolder::new(folder.path()).load::<B>(&device)?;
        assert_close("logits", &loaded.forward(ids(&device)), &model.forward(ids(&device)), 0.0);
    }
});

backend_test!(half_precision_checkpoints_load_as_floats::<B>(device) {
    let (folder, model) = folder_of::<B>(&TransformerConfig::gpt2(50, 24, 32, 2, 4), &device);
    let path = folder.path().join(WEIGHTS);
    let whole = stored(&path);
    let wanted = model.forward(ids(&device));
    for dtype in [Dtype::BF16, Dtype::F16] {
        let half = |bytes: &[u8]| {
            let value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            match dtype {
                Dtype::F16 => half::f16::from_f32(value).to_le_bytes(),
                _ => half::bf16::from_f32(value).to_le_bytes(),
            }
        };
        let halved = whole.iter().map(|(name, (_, shape, bytes))| {
            let bytes = bytes.chunks_exact(4).flat_map(half).collect();
            (name.clone(), (dtype, shape.clone(), bytes))
        });
        store(&path, &halved.collect());
        let mut told = Vec::new();
        let files = ModelFolder::new(folder.path());
        let loaded = files.load_in::<B>(FloatDType::F32, &mut |done, total| told.push((done, total)), &device)?;
        assert_close("hidden states", &loaded.forward(ids(&device)), &wanted, 5e-2);
        let total: usize = whole.values().map(|(_, _, bytes)| bytes.len() / 2).sum();
        assert_eq!(told.last(), Some(&(total as u64, total as u64)), "progress ends at the end");
    }
});

backend_test!(weights_that_do_not_fit_are_named::<B>(device) {
    let (folder, _) = folder_of::<B>(&TransformerConfig::llama(50, 24, 32, 2, 4), &device);
    let path = folder.path().join(WEIGHTS);
    let whole = stored(&path);
    let refusal = |change: &dyn Fn(&mut HashMap<String, Stored>)| {
        let mut changed = whole.clone();
        change(&mut changed);
        store(&path, &changed);
        match ModelFolder::new(folder.path()).load::<B>(&device) {
            Ok(_) => panic!("weights that do not fit"),
            Err(error) => error.to_string(),
        }
    };
    let query = "model.layers.1.self_attn.q_proj.weight";
    let message = refusal(&|tensors| drop(tensors.remove(query)));
    assert!(message.contains(query) && message.contains("missing"), "{message}");
    let message = refusal(&|tensors| {
        tensors.insert("model.layers.1.self_attn.q_proj.bias".into(), (Dtype::F32, vec![32], vec![0; 128]));
    });
    assert!(message.contains("q_proj.bias") && message.contains("not part"), "a bias must not be ignored: {message}");
    let message = refusal(&|tensors| tensors.get_mut(query).expect("a query").1 = vec![16, 64]);
    assert!(message.contains(query) && message.contains("[16, 64] instead of [32, 32]"), "{message}");
    let message = refusal(&|tensors| tensors.get_mut(query).expect("a query").0 = Dtype::I32);
    assert!(message.contains(query) && message.contains("I32"), "{message}");
    let message = refusal(&|tensors| tensors.retain(|name, _| !name.contains("layers")));
    assert!(message.contains("and 15 more"), "{message}");
    // Tensors of older versions and redundant ones do no harm.
    let mut more = whole.clone();
    more.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![4], vec![0; 16]));
    store(&path, &more);
    ModelFolder::new(folder.path()).load::<B>(&device)?;
});

const TEXT: &str = "a kiln, a potter and a bowl of clay; the potter turns the bowl, and the kiln bakes it.";

/// A folder with a small model over the characters of [`TEXT`].
fn writer<B: Backend>(device: &B::Device) -> (tempfile::TempDir, Transformer<B>, Tokenizer) {
    let tokenizer = Tokenizer::train(TokenizerKind::Char, &format!("{TEXT}[]:")).expect("a tokenizer");
    let config = TransformerConfig::llama(tokenizer.vocab_size(), 96, 32, 2, 4).with_n_kv_heads(2);
    let (folder, model) = folder_of::<B>(&config, device);
    tokenizer.save(&folder.path().join("tokenizer.json")).expect("a writable folder");
    (folder, model, tokenizer)
}

backend_test!(an_evaluation_is_the_mean_over_every_token_once::<B>(device) {
    let (folder, model, tokenizer) = writer::<B>(&device);
    let data = folder.path().join("text.txt");
    std::fs::write(&data, TEXT).expect("writable");
    let tokens: Vec<i32> = tokenizer.encode(TEXT)?.into_iter().map(|token| token as i32).collect();
    for (context, stride) in [(16, 5), (16, 16), (96, 48)] {
        // One row at a time, with each target from the first window that has it.
        let (mut sum, mut done, mut start) = (0.0, 0, 0);
        while done < tokens.len() - 1 {
            let end = (start + context).min(tokens.len() - 1);
            let row = Tensor::<B, 1, Int>::from_ints(&tokens[start..end], &device).reshape([1, end - start]);
            let logits = values(&activation::log_softmax(model.logits(model.forward(row)), 2));
            for at in done..end {
                let place = (at - start) * tokenizer.vocab_size() + tokens[at + 1] as usize;
                sum -= f64::from(logits[place]);
            }
            (done, start) = (end, start + stride);
        }
        let run = EvaluationRun {
            model: folder.path().into(),
            data: data.clone(),
            field: "text".into(),
            precision: Precision::F32,
            context: Some(context),
            stride: Some(stride),
        };
        let evaluation = run.run::<B>(fireclay::backend::RunContext::only(device.clone()))?;
        assert_eq!((evaluation.tokens, evaluation.bytes), (tokens.len() - 1, TEXT.len()));
        let wanted = sum / (tokens.len() - 1) as f64;
        assert!((evaluation.loss / wanted - 1.0).abs() < 1e-3, "{} instead of {wanted}", evaluation.loss);
    }
});

backend_test!(int8_weights_predict_nearly_as_well::<B>(device) {
    let (folder, ..) = writer::<B>(&device);
    let data = folder.path().join("text.txt");
    std::fs::write(&data, TEXT).expect("writable");
    let loss = |precision| -> Result<f64, fireclay::Failure> {
        let run = EvaluationRun {
            model: folder.path().into(),
            data: data.clone(),
            field: "text".into(),
            precision,
            context: Some(64),
            stride: None,
        };
        Ok(run.run::<B>(fireclay::backend::RunContext::only(device.clone()))?.loss)
    };
    let (whole, bytes) = (loss(Precision::F32)?, loss(Precision::Int8)?);
    assert_ne!(whole, bytes, "bytes are not floats");
    assert!((bytes / whole - 1.0).abs() < 0.02, "{bytes} instead of {whole}");
    let generator = Generator::<B>::open(folder.path(), Precision::Int8, device.clone())?;
    let options = GenerationOptions { temperature: 0.0, max_tokens: Some(20), ..Default::default() };
    let written = generator.generate(&generator.prepare("the clay", &options)?, &options, |_| {})?;
    assert_eq!(written.tokens.len(), 20);
    let refused = ModelFolder::new(folder.path()).save(generator.model()).expect_err("bytes").to_string();
    assert!(refused.contains("cannot be saved"), "{refused}");
});

/// Logits of transformers for the tokens of `ids()`, for each given folder.
const SCRIPT: &str = "
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager')
    logits = model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), use_cache=False).logits
    print(json.dumps(logits.flatten().tolist()))
";

/// If there is a Python with transformers: `FIRECLAY_PYTHON`, or `python3`.
#[test]
fn folders_that_are_saved_open_in_transformers() {
    type B = burn::backend::NdArray;
    let device = Default::default();
    let python = std::env::var("FIRECLAY_PYTHON").unwrap_or_else(|_| "python3".into());
    let has = std::process::Command::new(&python).args(["-c", "import torch, transformers"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        skip(&format!("{python} has no torch and transformers: nothing to open folders with"));
        return;
    }
    let configs = [
        TransformerConfig::gpt2(50, 24, 32, 2, 4),
        TransformerConfig::llama(50, 24, 32, 2, 4).with_n_kv_heads(2),
        TransformerConfig::mistral(50, 24, 32, 2, 4, 5),
        TransformerConfig::qwen2(50, 24, 32, 2, 4).with_n_kv_heads(1),
        TransformerConfig::qwen3(50, 24, 32, 2, 4, 10),
    ];
    let made: Vec<_> = configs.iter().map(|config| folder_of::<B>(config, &device)).collect();
    let mut command = std::process::Command::new(&python);
    command.args(["-c", SCRIPT]).args(made.iter().map(|(folder, _)| folder.path()));
    let output = command.output().expect("python runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).expect("text");
    let theirs: Vec<Vec<f32>> = printed.lines().map(|line| serde_json::from_str(line).expect("numbers")).collect();
    assert_eq!(theirs.len(), made.len());
    for ((_, model), theirs) in made.iter().zip(theirs) {
        let ours = values(&model.logits(model.forward(ids(&device))));
        assert_eq!(ours.len(), theirs.len());
        let furthest = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-4, "{:?}: {furthest}", model.config());
    }
}

backend_test!(a_conversation_answers_as_if_it_were_read_anew::<B>(device) {
    let (folder, ..) = writer::<B>(&device);
    let template = "{% for message in messages %}[{{ message.content }}]{% endfor %}:";
    std::fs::write(folder.path().join("chat_template.jinja"), template).expect("writable");
    // The repetition penalty also applies to words in the cache.
    let penalties = Penalties { repetition: 1.3, ..Default::default() };
    let options = GenerationOptions { temperature: 0.0, max_tokens: Some(9), penalties, ..Default::default() };
    let open = || Generator::<B>::open(folder.path(), Precision::F32, device.clone());
    let mut conversation = Conversation::new(open()?, ChatTemplate::open(folder.path())?, Some(90))?;
    conversation.set_system("kiln");
    for said in ["a bowl", "the clay", "a potter"] {
        let mut shown = String::new();
        let read = conversation.room().0;
        let answer = conversation.answer(said, &options, |text| shown.push_str(text))?;
        assert_eq!((answer.tokens.len(), &shown), (9, &answer.text));
        // The messages before this answer, in a new conversation's cache.
        let before = &conversation.messages()[..conversation.messages().len() - 1];
        let text = ChatTemplate::open(folder.path())?.render(&before.into())?;
        let generator = open()?;
        let prompt = generator.prepare(&text, &options)?;
        let anew = generator.generate(&prompt, &options, |_| {})?;
        assert_eq!(answer.tokens, anew.tokens, "after {text}");
        assert_eq!(answer.prompt_tokens, anew.prompt_tokens);
        assert!(read > 0 || before.len() == 2, "what was read before stays read");
    }
    let full = "clay ".repeat(20);
    let refused = conversation.answer(&full, &options, |_| {}).expect_err("too long").to_string();
    assert!(refused.contains("/reset") && refused.contains("90"), "{refused}");
    conversation.reset();
    assert_eq!(conversation.messages().len(), 1, "the system's words stay");
    assert!(conversation.answer("a bowl", &options, |_| {}).is_ok());
});
