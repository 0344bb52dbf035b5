//! Invariants of decoding: the same tokens as transformers, alone and in a batch, without
//! transfers.

use burn::module::{AutodiffModule, Param};
use burn::tensor::{DType, Int, Tensor, TensorData};
use fireclay::inference::generation::{GenerationOptions, Generator};
use fireclay::precision::{CachePrecision, Precision};
use fireclay::recipe::Recipe;
use fireclay::tasks::Task;
use fireclay::training::{Trainer, read_steps};
use fireclay_datasets::{BatchKey, Tokenizer, TokenizerKind};
use fireclay_kernels::recorder::{Copies, Recording, Source};
use fireclay_kernels::{Backend, Format, Penalties, SampledRow, SampledRows, Sampling, TokenCounts};
use fireclay_model::{Cache, Hidden, ModelFolder, PAGE_TOKENS, RowId, Transformer, TransformerConfig};

use crate::backend_test;
use crate::compare::values;
use crate::golden::{Golden, folder};

/// The folders that have goldens for decoding.
const FAMILIES: [&str; 8] = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "llama3", "llama_linear", "llama_yarn"];

/// A cache with a prefilled prompt per row, room for more tokens, and the logits after the prompts.
fn read<B: Backend>(model: &Transformer<B>, prompts: &[&[u32]], room: usize) -> (Cache<B>, Vec<RowId>, Hidden<B>) {
    let mut cache = model.cache(prompts.len() * room.next_multiple_of(PAGE_TOKENS));
    let rows: Vec<RowId> = prompts.iter().map(|_| cache.add_row()).collect();
    rows.iter().for_each(|row| cache.reserve(*row, room).expect("pages for all"));
    let prompts: Vec<(RowId, &[u32])> = rows.iter().copied().zip(prompts.iter().copied()).collect();
    let hidden = model.prefill(&prompts, &mut cache);
    (cache, rows, hidden)
}

/// Greedy sampling for this many rows.
pub(crate) fn greedy_rows<B: Backend>(rows: usize, device: &B::Device) -> SampledRows<B> {
    SampledRows::new(&vec![Sampling::greedy().into(); rows], device)
}

/// The greedy tokens after each prompt, `[prompt][step]`.
pub(crate) fn greedy<B: Backend>(
    model: &Transformer<B>,
    prompts: &[&[u32]],
    steps: usize,
    device: &B::Device,
) -> Vec<Vec<u32>> {
    let longest = prompts.iter().map(|prompt| prompt.len()).max().expect("prompts");
    let (mut cache, rows, hidden) = read(model, prompts, longest + steps);
    let sampled = greedy_rows(rows.len(), device);
    let mut next = model.sample(hidden, &sampled, None, &cache);
    let mut written = vec![Vec::new(); prompts.len()];
    for step in 0..steps {
        let tokens = next.to_data();
        written.iter_mut().zip(tokens.iter::<i64>()).for_each(|(text, token)| text.push(token as u32));
        if step + 1 < steps {
            let hidden = model.decode(next, &rows, &mut cache);
            next = model.sample(hidden, &sampled, None, &cache);
        }
    }
    written
}

/// Asserts that `call` panics with a message that contains `part`.
#[track_caller]
fn refused<T>(part: &str, call: impl FnOnce() -> T) {
    let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) else { panic!("no panic: {part}") };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default();
    assert!(text.contains(part), "{text}");
}

backend_test!(a_cache_is_for_its_model_with_its_weights_and_for_its_own_rows::<B>(device) {
    let init = |seed| TransformerConfig::qwen3(50, 64, 32, 2, 4, 16).init::<B>(seed, &device);
    let (model, other) = (init(1)?, init(2)?);
    let mut cache = model.cache(64);
    let row = cache.add_row();
    let mut read = |model: &Transformer<B>, row| model.prefill(&[(row, &[1, 2, 3])], &mut cache).states();
    let own = read(&model, row);
    assert_eq!(own.dims(), [1, 32]);
    read(&model.clone(), row);
    refused("belongs to another model", || read(&other, row));
    refused("or other weights", || {
        read(&model.clone().with_quantized_matrices(Format::Int8).expect("a device that works"), row)
    });
    let mut copies = model.clone();
    copies.put_copies(Default::default());
    refused("or other weights", || read(&copies, row));
    // Rows of another cache, with other ids.
    let mut foreign = other.cache(64);
    let stranger = foreign.add_row();
    assert_ne!(stranger, row);
    assert_eq!(cache.length(stranger), 0);
    refused("a row of the cache", || cache.reserve(stranger, 1));
    cache.remove_row(stranger);
    assert_eq!(cache.length(row), 6, "the others are as they were");
});

backend_test!(greedy_tokens_are_those_of_transformers_in_a_batch_and_alone::<B>(device) {
    for name in FAMILIES {
        let model = ModelFolder::new(folder(name)).load::<B>(&device)?;
        let golden = Golden::open(&format!("{name}/golden.safetensors"));
        let integers = |name: &str| golden.values(name).iter().map(|value| *value as u32).collect::<Vec<_>>();
        let (prompts, lengths, wanted) =
            (integers("greedy_prompts"), integers("greedy_lengths"), integers("greedy_tokens"));
        let (width, steps) = (prompts.len() / lengths.len(), wanted.len() / lengths.len());
        let prompts = prompts.chunks_exact(width).zip(&lengths).map(|(row, length)| &row[..*length as usize]);
        let prompts: Vec<&[u32]> = prompts.collect();
        let together = greedy(&model, &prompts, steps, &device);
        for (row, (written, wanted)) in together.iter().zip(wanted.chunks_exact(steps)).enumerate() {
            assert_eq!(written, wanted, "{name}, row {row} of a batch");
            assert_eq!(&greedy(&model, &prompts[row..=row], steps, &device)[0], wanted, "{name}, row {row} alone");
        }
        // Without a cache, the whole sequence is recomputed for each token.
        let mut text: Vec<i32> = prompts[0].iter().map(|token| *token as i32).collect();
        for wanted in &together[0][..12] {
            let ids = TensorData::new(text.clone(), [1, text.len()]);
            let hidden = model.forward(Tensor::<B, 2, Int>::from_data(ids, &device));
            let last = hidden.narrow(1, text.len() - 1, 1);
            let next = model.logits(last).flatten::<1>(0, 2).argmax(0);
            let next = next.into_data().iter::<i64>().next().expect("a token");
            assert_eq!(next, i64::from(*wanted), "{name} without a cache");
            text.push(next as i32);
        }
    }
});

backend_test!(a_cache_of_int8_keeps_perplexity_within_a_tenth_of_a_percent::<B>(device) {
    let recipe = Recipe::shipped("stories").expect("the default recipe");
    let small = [("d_model", "64"), ("n_layers", "2"), ("n_heads", "4"), ("batch_size", "8"), ("warmup_steps", "5")];
    let recipe = small.into_iter().try_fold(recipe, |recipe, (key, value)| recipe.with(key, value))?;
    let mut trainer = Trainer::<B>::new(&recipe, recipe.task()?, device.clone())?;
    let steps: Vec<_> = (0..60).map(|_| trainer.train_step().expect("in memory")).collect();
    let losses = read_steps(&steps)?;
    let Task::Language(language) = recipe.task()? else { panic!("stories are a language") };
    let batch = language.corpus.batch(BatchKey::new(9, 0), 16)?;
    let (width, rows) = (batch.inputs().len() / 16, 16);
    // Prefill a third of each row, then decode the rest token by token.
    let loss = |model: &Transformer<B>| {
        let text = |row: usize, at: usize| batch.inputs()[row * width + at];
        let begins: Vec<Vec<u32>> =
            (0..rows).map(|row| (0..width / 3).map(|at| text(row, at) as u32).collect()).collect();
        let prompts: Vec<&[u32]> = begins.iter().map(Vec::as_slice).collect();
        let (mut cache, ids, mut hidden) = read(model, &prompts, width);
        let (mut sum, mut count) = (0.0, 0);
        for at in width / 3..width {
            let logits = values(&model.logits(hidden.states().unsqueeze()).cast(DType::F32));
            for (row, logits) in logits.chunks_exact(logits.len() / rows).enumerate() {
                let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
                // The padding after a story's end is ignored.
                if let Ok(target) = usize::try_from(batch.targets()[row * width + at - 1]) {
                    sum += total.ln() - f64::from(logits[target]);
                    count += 1;
                }
            }
            let next = TensorData::new((0..rows).map(|row| text(row, at)).collect::<Vec<i32>>(), [rows]);
            hidden = model.decode(Tensor::from_data(next, &device), &ids, &mut cache);
        }
        sum / f64::from(count)
    };
    let model = trainer.model().valid();
    let (plain, int8) = (loss(&model), loss(&model.clone().with_int8_cache()));
    assert!(plain < 0.7 * losses[0].0, "something was learnt: {plain}");
    assert!(plain != int8, "the cache of bytes was used");
    assert!((int8 - plain).abs() < 3e-4, "{plain} nats, {int8} with a cache of bytes");
});

backend_test!(a_cache_of_int8_is_refused_where_heads_do_not_fit_it::<B>(device) {
    let model = ModelFolder::new(folder("llama")).load::<B>(&device)?;
    let tokenizer = Tokenizer::train(TokenizerKind::Char, "a potter")?;
    let refused = Generator::new(model, tokenizer, device).with_cache(CachePrecision::Int8).err().expect("heads of 6");
    let message = refused.to_string();
    assert!(message.contains("this model's is 6") && message.contains("--cache-dtype"), "{message}");
});

backend_test!(prompts_of_a_batch_are_continued_as_they_are_alone::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "the quick brown fox jumps over the lazy dog. ";
    let tokenizer = Tokenizer::train(TokenizerKind::Char, text)?;
    let config = TransformerConfig::qwen3(tokenizer.vocab_size(), 80, 32, 2, 4, 8).with_init_deviation(0.3);
    ModelFolder::new(folder.path()).save(&config.init::<B>(3, &device)?)?;
    tokenizer.save(&folder.path().join("tokenizer.json"))?;
    let generator = Generator::<B>::open(folder.path(), Precision::F32, device.clone())?;
    let prompts = ["the quick", "a", "lazy dog. the", "over"];
    let options = GenerationOptions {
        max_tokens: Some(40),
        top_k: Some(12),
        top_p: Some(0.95),
        penalties: Penalties { repetition: 1.1, presence: 0.1, frequency: 0.1 },
        stop: vec!["og".into()],
        ..Default::default()
    };
    let prepared = prompts.iter().map(|prompt| generator.prepare(prompt, &options)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<_> = prepared.iter().collect();
    let mut shown = vec![String::new(); prompts.len()];
    let together = generator.generate_batch(&all, 0, &options, |row, piece| shown[row].push_str(piece))?;
    for (row, prepared) in prepared.iter().enumerate() {
        let alone = generator.generate_batch(&[prepared], row as u64, &options, |_, _| {})?;
        assert_eq!(alone[0].tokens, together[row].tokens, "prompt {row}");
        assert_eq!(alone[0].text, together[row].text, "prompt {row}");
        assert_eq!(shown[row], together[row].text, "what is shown is what is given");
    }
    assert_ne!(together[0].tokens, together[1].tokens);
    // The same prompt twice samples from two streams.
    let twice = generator.generate_batch(&[&prepared[0], &prepared[0]], 0, &options, |_, _| {})?;
    assert_ne!(twice[0].tokens, twice[1].tokens);
});

backend_test!(logits_that_are_not_numbers_end_a_text_with_one_line::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::train(TokenizerKind::Char, "abc")?;
    let config = TransformerConfig::llama(tokenizer.vocab_size(), 40, 32, 2, 4);
    let mut model = config.init::<B>(3, &device)?;
    let norm = model.final_norm.as_mut().expect("a norm before the head");
    norm.gamma = Param::from_tensor(Tensor::full([32], f32::NAN, &device));
    ModelFolder::new(folder.path()).save(&model)?;
    tokenizer.save(&folder.path().join("tokenizer.json"))?;
    let generator = Generator::<B>::open(folder.path(), Precision::F32, device.clone())?;
    for temperature in [0.0, 0.8] {
        let options = GenerationOptions { max_tokens: Some(8), temperature, ..Default::default() };
        let prepared = generator.prepare("abca", &options)?;
        let failure = generator.generate(&prepared, &options, |_| {}).expect_err("no token can be drawn").to_string();
        assert!(failure.starts_with("the model's logits are NaN after 4 tokens: "), "{failure}");
        assert!(!failure.contains('\n'), "{failure}");
    }
});

backend_test!(a_text_that_fills_the_context_of_a_window_goes_on_from_its_end::<B>(device) {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::train(TokenizerKind::Char, "abcdefghijklmnopqrstuvwxyz. ")?;
    let context = 24;
    let config = TransformerConfig::mistral(tokenizer.vocab_size(), context, 32, 2, 4, 5).with_n_kv_heads(2);
    let config = config.with_init_deviation(0.3);
    let model = config.init::<B>(3, &device)?;
    ModelFolder::new(folder.path()).save(&model)?;
    tokenizer.save(&folder.path().join("tokenizer.json"))?;
    let generator = Generator::<B>::open(folder.path(), Precision::F32, device.clone())?;
    let options = GenerationOptions { temperature: 0.0, max_tokens: Some(70), ..GenerationOptions::default() };
    // For the last one, the sixteenth token fills the context and is prefilled with those before
    // it.
    let prompts = ["the fox", "a", "jumps over the lazy dog", "the fox."];
    assert_eq!(tokenizer.encode(prompts[3])?.len() + 16, context);
    let prepared: Vec<_> =
        prompts.iter().map(|prompt| generator.prepare(prompt, &options).expect("a window")).collect();
    let together = generator.generate_batch(&prepared.iter().collect::<Vec<_>>(), 0, &options, |_, _| {})?;
    for ((prompt, prepared), together) in prompts.iter().zip(&prepared).zip(together) {
        // Each time the context is full, half of it is recomputed.
        let mut text = tokenizer.encode(prompt)?;
        let begun = text.len();
        while text.len() < begun + 70 {
            let kept = if text.len() == begun { begun } else { context / 2 };
            let end = text.split_off(text.len() - kept);
            let written = greedy(&model, &[&end], context - kept + 1, &device);
            text.extend(end.into_iter().chain(written.into_iter().flatten()));
        }
        assert_eq!(together.tokens, text[begun..begun + 70], "{prompt}");
        assert_eq!(generator.generate(prepared, &options, |_| {})?.tokens, together.tokens, "{prompt}, alone");
    }
    let whole = TransformerConfig::llama(tokenizer.vocab_size(), context, 32, 2, 4);
    ModelFolder::new(folder.path()).save(&whole.init::<B>(3, &device)?)?;
    let without = Generator::<B>::open(folder.path(), Precision::F32, device.clone())?;
    let refusal = without.prepare("the fox", &options).expect_err("no window").to_string();
    assert!(refusal.contains("context is 24"), "{refusal}");
});

backend_test!(a_decoded_token_sends_nothing_and_reads_its_number::<B>(device) {
    let config = TransformerConfig::qwen3(300, 600, 64, 4, 4, 16).with_n_kv_heads(2).with_init_deviation(0.3);
    let gpt2 = TransformerConfig::gpt2(300, 600, 64, 4, 4).with_init_deviation(0.3);
    for (config, batch_size) in [(config, 3), (gpt2, 1)] {
        let model: Transformer<B> = config.init(3, &device)?;
        let prompts: Vec<Vec<u32>> = (0..batch_size).map(|row| vec![7; 3 + 2 * row]).collect();
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let mut counts = TokenCounts::of_prompts(&prompts, 300, &device);
        let row = |line: usize| {
            let penalties = Penalties { repetition: 1.1, presence: 0.1, frequency: 0.1 };
            let sampling = Sampling::greedy().with_temperature(0.8).with_seed(3, line as u64).with_penalties(penalties);
            SampledRow { sampling: sampling.with_top_k(Some(40)).with_top_p(Some(0.9)), line: Some(line) }
        };
        let sampled = SampledRows::new(&(0..batch_size).map(row).collect::<Vec<_>>(), &device);
        let (mut cache, rows, hidden) = read(&model, &prompts, 300);
        let mut next = model.sample(hidden, &sampled, Some(&mut counts), &cache);
        let mut decode = |count: u64| {
            let mut kept = Vec::new();
            for _ in 0..count {
                let hidden = model.decode(next.clone(), &rows, &mut cache);
                next = model.sample(hidden, &sampled, Some(&mut counts), &cache);
                kept.push(next.clone());
            }
            let reads = kept.into_iter().fold(burn::tensor::Transaction::<B>::default(), |all, one| all.register(one));
            reads.try_execute().expect("tokens")
        };
        // The first steps compile kernels and allocate memory.
        decode(8);
        let recording = Recording::start::<B>(&device).expect("a recording");
        let tokens = decode(8);
        let report = recording.stop().expect("a report");
        assert_eq!(tokens.len(), 8);
        println!("{report}");
        assert!(report.fallbacks.is_empty(), "{report}");
        // A fused step is one operation, and sampling from its logits another.
        let whole = report.calls("decode_step");
        assert!(whole == 8 || whole == 0, "{report}");
        assert_eq!(report.calls("cached_attention"), (8 - whole) * 4, "{report}");
        assert_eq!(report.calls("head_sample"), 8 - whole, "{report}");
        match report.source {
            Source::Calls | Source::Host | Source::Waits => {
                assert_eq!(report.total.to_host, None, "nothing tells of copies here")
            }
            Source::Cupti => {
                let bytes = |copies: Option<Copies>| copies.map(|copies| copies.bytes);
                assert_eq!(bytes(report.total.to_device), Some(0), "nothing goes up: {report}");
                let down = bytes(report.total.to_host).expect("counted");
                assert!(down <= 8 * 8 * batch_size as u64, "a number a row comes down: {report}");
                assert_eq!(report.total.allocations, Some(0), "{report}");
                // Each tensor read is waited for, but never the whole device.
                assert!(report.total.synchronisations.is_some_and(|waits| waits <= 8), "{report}");
                // Seven kernels per layer in f32, with separate norms, and those around the layers.
                assert!(report.total.launches.is_some_and(|launches| launches <= 8 * (4 * 7 + 7)), "{report}");
            }
        }
    }
});

backend_test!(long_texts_take_no_more_memory_than_their_cache::<B>(device) {
    let steps = if B::name(&device).contains("cuda") { 4000 } else { 300 };
    let config = TransformerConfig::llama(50, steps + 40, 32, 2, 4).with_init_deviation(0.3);
    let model: Transformer<B> = config.init(3, &device)?;
    let (mut cache, rows, hidden) = read(&model, &[&[1, 2, 3]], steps + 20);
    let sampled = greedy_rows(1, &device);
    let mut next = model.sample(hidden, &sampled, None, &cache);
    let mut decode = |count: usize| {
        for step in 0..count {
            let hidden = model.decode(next.clone(), &rows, &mut cache);
            next = model.sample(hidden, &sampled, None, &cache);
            if step % 16 == 15 {
                next.to_data();
            }
        }
        next.to_data();
    };
    // Beyond one piece of keys, where partial sums need their own memory.
    decode(10);
    let recording = Recording::start::<B>(&device).expect("a recording");
    decode(steps);
    let report = recording.stop().expect("a report");
    assert_eq!(cache.length(rows[0]), 3 + 10 + steps);
    if report.source == Source::Cupti {
        // Memory for the longest row is allocated as rows grow, from the same pool pages.
        assert!(report.total.allocations.is_some_and(|allocations| allocations <= 2), "{report}");
    }
});
