//! Invariants of the scheduler when many sequences join and leave at any step.

use std::collections::BTreeMap;

use fireclay::Failure;
use fireclay::inference::generation::scheduler::{
    Finish, OutputToken, Request, RequestId, Scheduler, SchedulerOptions,
};
use fireclay_kernels::{Backend, Penalties, Sampling, TokenCounts};
use fireclay_model::{Transformer, TransformerConfig};

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};

use crate::backend_test;
use crate::families::causal_families;

const VOCABULARY: usize = 90;
const ROOMY: SchedulerOptions = SchedulerOptions { rows: 8, step_tokens: 48, cache_tokens: 40 * 64 };

fn model<B: Backend>(device: &B::Device) -> Result<Transformer<B>, Failure> {
    let config = TransformerConfig::qwen3(VOCABULARY, 320, 32, 2, 4, 8).with_n_kv_heads(2).with_init_deviation(0.3);
    Ok(config.init(3, device)?)
}

/// Reproducible numbers below a bound.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// Requests of all lengths, no two with the same sampling.
fn requests(count: usize) -> Vec<Request> {
    let mut numbers = Numbers(7);
    let request = |at: usize| {
        let length = 1 + numbers.below(if at.is_multiple_of(5) { 200 } else { 40 });
        let prompt = (0..length).map(|_| numbers.below(VOCABULARY) as u32).collect();
        let plain = Sampling::greedy().with_temperature(0.7 + at as f64 * 0.01).with_seed(at as u64, 1);
        let penalties = Penalties { repetition: 1.2, presence: 0.1, frequency: 0.2 };
        let sampling = match at % 6 {
            0 => Sampling::greedy(),
            1 => plain,
            2 => plain.with_top_k(Some(5 + at)),
            3 => plain.with_top_p(Some(0.9)).with_penalties(penalties),
            4 => plain.with_min_p(Some(0.05)),
            _ => plain.with_top_k(Some(20)).with_top_p(Some(0.8)),
        };
        let biases = if at.is_multiple_of(4) {
            vec![(3, 2.0), (5, TokenCounts::<burn::backend::NdArray>::FORBIDDEN)]
        } else {
            vec![]
        };
        let max_tokens = 1 + numbers.below(60);
        Request { sampling, biases, stop_tokens: vec![(at % 7) as u32 + 60], ..Request::new(prompt, max_tokens) }
    };
    (0..count).map(request).collect()
}

/// The output of each request, and how it finished.
pub(crate) type Outputs = BTreeMap<RequestId, (Vec<u32>, Option<Finish>)>;

/// Runs a step and collects its output.
pub(crate) fn step<B: Backend>(
    scheduler: &mut Scheduler<B>,
    model: &Transformer<B>,
    outputs: &mut Outputs,
) -> Result<(), Failure> {
    scheduler.step(model)?;
    for written in scheduler.take() {
        let (tokens, finish) = outputs.entry(written.id).or_default();
        assert!(finish.is_none(), "nothing comes behind the end");
        tokens.extend(written.tokens.iter().map(|written| written.token));
        *finish = written.finish;
    }
    Ok(())
}

/// The output of a request alone.
fn alone<B: Backend>(model: &Transformer<B>, request: &Request, device: &B::Device) -> Result<Vec<u32>, Failure> {
    let mut scheduler = Scheduler::new(model, ROOMY, device.clone());
    let id = scheduler.add(request.clone())?;
    let mut outputs = Outputs::new();
    while !scheduler.is_idle() {
        step(&mut scheduler, model, &mut outputs)?;
    }
    Ok(outputs.remove(&id).expect("a text").0)
}

/// All requests in one scheduler, each added after some steps; finally no pages are left in use.
fn together<B: Backend>(
    model: &Transformer<B>,
    requests: &[Request],
    options: SchedulerOptions,
    device: &B::Device,
) -> Result<(Vec<Vec<u32>>, usize), Failure> {
    let mut scheduler = Scheduler::new(model, options, device.clone());
    let mut numbers = Numbers(5);
    let (mut outputs, mut ids) = (Outputs::new(), Vec::new());
    let mut coming = requests.iter();
    loop {
        if ids.len() < requests.len() && numbers.below(3) == 0 {
            for request in coming.by_ref().take(1 + numbers.below(3)) {
                ids.push(scheduler.add(request.clone())?);
            }
        }
        if ids.len() == requests.len() && scheduler.is_idle() {
            break;
        }
        step(&mut scheduler, model, &mut outputs)?;
    }
    let load = scheduler.load();
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.free_pages), (0, 0, 0, load.pages), "{load:?}");
    let text = |(id, request): (&RequestId, &Request)| {
        let (tokens, finish) = outputs.remove(id).expect("a text");
        let ended = tokens.last().is_some_and(|last| request.stop_tokens.contains(last));
        let wanted = if ended { Finish::End } else { Finish::Length };
        assert_eq!(finish, Some(wanted));
        assert!(ended || tokens.len() == request.max_tokens);
        tokens
    };
    Ok((ids.iter().zip(requests).map(text).collect(), load.preemptions))
}

backend_test!(texts_are_the_same_alone_and_among_others_that_come_and_go::<B>(device) {
    let model = model::<B>(&device)?;
    let requests = requests(if B::is_synchronous() { 40 } else { 14 });
    let wanted = requests.iter().map(|request| alone(&model, request, &device)).collect::<Result<Vec<_>, _>>()?;
    let (outputs, preemptions) = together(&model, &requests, ROOMY, &device)?;
    assert_eq!(preemptions, 0);
    assert_eq!(outputs, wanted);
    for (request, text) in requests.iter().zip(&outputs) {
        assert!(request.biases.is_empty() || !text.contains(&5), "a forbidden token");
    }
});

backend_test!(texts_are_the_same_where_the_cache_is_far_too_small::<B>(device) {
    let model = model::<B>(&device)?;
    let requests = requests(if B::is_synchronous() { 40 } else { 14 });
    let (wanted, _) = together(&model, &requests, ROOMY, &device)?;
    let tight = SchedulerOptions { cache_tokens: 5 * 64, ..ROOMY };
    let (outputs, preemptions) = together(&model, &requests, tight, &device)?;
    assert!(preemptions > 0, "some have to give way");
    assert_eq!(outputs, wanted);
});

backend_test!(outputs_of_every_kind_of_layer_are_the_same_alone_batched_and_preempted::<B>(device) {
    // Where each launch is slow, those that have most settings.
    let is_worth_it = |name: &str| B::is_synchronous() || ["gemma2", "phi3"].contains(&name);
    for (name, config) in causal_families().into_iter().filter(|(name, _)| is_worth_it(name)) {
        let config = TransformerConfig { vocab_size: VOCABULARY, context_length: 320, ..config };
        let model: Transformer<B> = config.with_init_deviation(0.3).init(3, &device)?;
        let longer = |request| Request { max_tokens: 60, stop_tokens: Vec::new(), ..request };
        let requests: Vec<Request> = requests(7).into_iter().map(longer).collect();
        let wanted = requests.iter().map(|request| alone(&model, request, &device)).collect::<Result<Vec<_>, _>>()?;
        let tight = SchedulerOptions { cache_tokens: 5 * 64, ..ROOMY };
        let (outputs, preemptions) = together(&model, &requests, tight, &device)?;
        assert!(preemptions > 0, "{name}: none was preempted");
        assert_eq!(outputs, wanted, "{name}");
    }
});

backend_test!(texts_that_wait_for_pages_wait_for_those_that_tokens_need::<B>(device) {
    let model = model::<B>(&device)?;
    let tight = SchedulerOptions { cache_tokens: 7 * 64, ..ROOMY };
    let mut scheduler = Scheduler::new(&model, tight, device.clone());
    // The first one has the cache for itself, and reserves pages in advance.
    scheduler.add(Request::new(vec![1; 20], 100))?;
    let mut outputs = Outputs::new();
    for _ in 0..3 {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    for request in requests(24) {
        scheduler.add(Request { stop_tokens: vec![], ..request })?;
    }
    let mut waited = 0;
    while !scheduler.is_idle() {
        step(&mut scheduler, &model, &mut outputs)?;
        let load = scheduler.load();
        let running = load.prefilling + load.decoding;
        if load.waiting > 0 && load.free_pages == 0 && running < tight.rows {
            let held = (load.pages - load.free_pages) * 64;
            // A token in flight occupies a position, too.
            assert!(held <= load.tokens + running * 64, "{load:?}");
            waited += 1;
        }
    }
    assert!(waited > 10, "some waited for pages in {waited} steps");
});

backend_test!(a_prompt_that_was_read_ahead_is_written_as_soon_as_another_text_ends::<B>(device) {
    let model = model::<B>(&device)?;
    let request = |at: u32| Request::new((0..8).map(|place| at * 10 + place).collect(), 30);
    let requests: Vec<Request> = (0..6).map(request).collect();
    let mut scheduler = Scheduler::new(&model, SchedulerOptions { rows: 4, ..ROOMY }, device.clone());
    let ids = requests.iter().map(|request| scheduler.add(request.clone())).collect::<Result<Vec<_>, _>>()?;
    let mut outputs = Outputs::new();
    step(&mut scheduler, &model, &mut outputs)?;
    let load = scheduler.load();
    // Four are decoding; one waits, prefilled up to its last token.
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.tokens), (1, 1, 4, 4 * 8 + 7), "{load:?}");
    scheduler.cancel(ids[0]);
    step(&mut scheduler, &model, &mut outputs)?;
    let load = scheduler.load();
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.tokens), (1, 0, 4, 3 * 9 + 8), "{load:?}");
    while !scheduler.is_idle() {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    for (id, request) in ids.iter().zip(&requests).skip(1) {
        assert_eq!(outputs[id].0, alone(&model, request, &device)?);
    }
});

backend_test!(a_prompt_that_does_not_fit_its_step_is_read_ahead_in_part::<B>(device) {
    let model = model::<B>(&device)?;
    let request = |at: u32, length: u32| Request::new((0..length).map(|place| (at * 10 + place) % 90).collect(), 30);
    let requests: Vec<Request> = (0..5).map(|at| request(at, if at == 4 { 100 } else { 8 })).collect();
    let options = SchedulerOptions { rows: 4, step_tokens: 4 * 8 + 70, ..ROOMY };
    let mut scheduler = Scheduler::new(&model, options, device.clone());
    let ids = requests.iter().map(|request| scheduler.add(request.clone())).collect::<Result<Vec<_>, _>>()?;
    let mut outputs = Outputs::new();
    // As much as the budget allows; no more while it waits for a slot; the rest once it has one.
    for (cancelled, tokens) in [(None, 4 * 8 + 70), (None, 4 * 9 + 70), (Some(0), 3 * 10 + 100)] {
        if let Some(at) = cancelled {
            scheduler.cancel(ids[at]);
        }
        step(&mut scheduler, &model, &mut outputs)?;
        assert_eq!(scheduler.load().tokens, tokens, "{:?}", scheduler.load());
    }
    while !scheduler.is_idle() {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    for (id, request) in ids.iter().zip(&requests).skip(1) {
        assert_eq!(outputs[id].0, alone(&model, request, &device)?);
    }
});

backend_test!(a_cancelled_request_gives_its_pages_back_and_changes_no_other::<B>(device) {
    let model = model::<B>(&device)?;
    let requests: Vec<Request> =
        requests(6).into_iter().map(|request| Request { stop_tokens: vec![], max_tokens: 40, ..request }).collect();
    let mut scheduler = Scheduler::new(&model, ROOMY, device.clone());
    let add = |scheduler: &mut Scheduler<B>, at: usize| scheduler.add(requests[at].clone()).expect("it fits");
    let ids: Vec<RequestId> = (0..6).map(|at| add(&mut scheduler, at)).collect();
    let mut outputs = Outputs::new();
    // One decoding, one in prefill, and one waiting.
    for (steps, cancelled) in [(12, 1), (1, 4), (1, 5)] {
        for _ in 0..steps {
            step(&mut scheduler, &model, &mut outputs)?;
        }
        scheduler.cancel(ids[cancelled]);
    }
    let late = add(&mut scheduler, 1);
    scheduler.cancel(late);
    while !scheduler.is_idle() {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    let load = scheduler.load();
    assert_eq!(load.free_pages, load.pages);
    for at in [0, 2, 3] {
        assert_eq!(outputs[&ids[at]].0, alone(&model, &requests[at], &device)?, "request {at}");
    }
    assert!(outputs.get(&ids[1]).is_none_or(|(_, finish)| finish.is_none()) && !outputs.contains_key(&late));
});

backend_test!(a_warm_up_leaves_nothing_behind::<B>(device) {
    let model = model::<B>(&device)?;
    let request = Request {
        sampling: Sampling::greedy().with_temperature(1.0).with_seed(3, 5),
        ..Request::new(vec![1, 2, 3], 20)
    };
    let wanted = alone(&model, &request, &device)?;
    // Room for many; for a page or two; and limited.
    for (options, steps) in [
        (ROOMY, usize::MAX),
        (SchedulerOptions { rows: 3, step_tokens: 5, cache_tokens: 64 }, usize::MAX),
        (SchedulerOptions { cache_tokens: 70, ..ROOMY }, usize::MAX),
        (ROOMY, 4),
    ] {
        let mut scheduler = Scheduler::new(&model, options, device.clone());
        let taken = std::cell::Cell::new(0);
        scheduler.warm_up(&model, options.rows, || taken.replace(taken.get() + 1) < steps)?;
        assert!(taken.get() >= steps.min(10), "{options:?}: {} steps", taken.get());
        let load = scheduler.load();
        assert_eq!((load.waiting, load.prefilling, load.decoding), (0, 0, 0), "{options:?}");
        let mut outputs = Outputs::new();
        let id = scheduler.add(request.clone()).expect("it fits");
        while !scheduler.is_idle() {
            step(&mut scheduler, &model, &mut outputs)?;
        }
        assert_eq!(outputs[&id].0, wanted, "{options:?}");
        let load = scheduler.load();
        assert_eq!(load.free_pages, load.pages, "{options:?}");
    }
});

backend_test!(prompts_that_begin_alike_are_read_once::<B>(device) {
    let model = model::<B>(&device)?;
    let prompt: Vec<u32> = (0..200).map(|at| at * 7 % VOCABULARY as u32).collect();
    let other: Vec<u32> = prompt[..150].iter().copied().chain([1, 2, 3]).collect();
    let requests = [Request::new(prompt.clone(), 9), Request::new(prompt, 9), Request::new(other, 9)];
    let wanted = requests.iter().map(|request| alone(&model, request, &device)).collect::<Result<Vec<_>, _>>()?;
    let mut scheduler = Scheduler::new(&model, ROOMY, device.clone());
    let mut outputs = Outputs::new();
    let mut steps = Vec::new();
    for (request, wanted) in requests.iter().zip(&wanted) {
        let id = scheduler.add(request.clone()).expect("it fits");
        let mut count = 0;
        while !outputs.contains_key(&id) {
            step(&mut scheduler, &model, &mut outputs)?;
            count += 1;
        }
        steps.push(count);
        while !scheduler.is_idle() {
            step(&mut scheduler, &model, &mut outputs)?;
        }
        assert_eq!(&outputs[&id].0, wanted);
    }
    // 200 tokens, 48 per step; then all but the first three pages, which are 8, and all but the
    // first two, 25.
    assert_eq!(steps, [5, 1, 1]);
});

// A multi-step launch in which all sequences have ended computes nothing, not even the keys of a
// stop token.
backend_test!(a_token_that_ends_a_text_is_in_no_page_that_others_share::<B>(device) {
    let model = model::<B>(&device)?;
    let prompt: Vec<u32> = (0..56).map(|at| at * 7 % VOCABULARY as u32).collect();
    let written = alone(&model, &Request::new(prompt.clone(), 8), &device)?;
    let end = written[7];
    assert!(!written[..7].contains(&end), "the last of eight tokens is the first of its kind: {written:?}");
    let mut scheduler = Scheduler::new(&model, ROOMY, device.clone());
    let mut outputs = Outputs::new();
    let mut write = |request: &Request| {
        let id = scheduler.add(request.clone()).expect("it fits");
        let mut steps = 0;
        while !outputs.contains_key(&id) {
            step(&mut scheduler, &model, &mut outputs)?;
            steps += 1;
        }
        while !scheduler.is_idle() {
            step(&mut scheduler, &model, &mut outputs)?;
        }
        Ok::<_, Failure>((steps, outputs[&id].0.clone()))
    };
    let ended = Request { stop_tokens: vec![end], ..Request::new(prompt.clone(), 40) };
    assert_eq!(write(&ended)?.1, written, "it stop_tokens at the last cell of its page");
    // The next request recomputes the page: 97 tokens, 48 per step.
    let next: Vec<u32> = prompt.iter().chain(&written).copied().chain(0..33).collect();
    let next = Request::new(next, 9);
    assert_eq!(write(&next)?, (3, alone(&model, &next, &device)?));
});

backend_test!(a_text_that_is_paused_goes_on_where_it_was::<B>(device) {
    let model = model::<B>(&device)?;
    let requests = requests(6);
    let wanted = requests.iter().map(|request| alone(&model, request, &device)).collect::<Result<Vec<_>, _>>()?;
    let options = SchedulerOptions { rows: 2, ..ROOMY };
    let mut scheduler = Scheduler::new(&model, options, device.clone());
    let ids = requests.iter().map(|request| scheduler.add(request.clone())).collect::<Result<Vec<_>, _>>()?;
    let (mut outputs, mut paused, mut pauses, mut numbers) = (Outputs::new(), Vec::new(), 0, Numbers(9));
    while !scheduler.is_idle() || !paused.is_empty() {
        let id = ids[numbers.below(ids.len())];
        if numbers.below(4) == 0 && !paused.contains(&id) && scheduler.pause(id)? {
            pauses += 1;
            paused.push(id);
        }
        if numbers.below(3) == 0 && !paused.is_empty() {
            scheduler.resume(paused.remove(0));
        }
        step(&mut scheduler, &model, &mut outputs)?;
    }
    assert!(pauses > 10, "{pauses}");
    assert!(ids.iter().zip(&wanted).all(|(id, wanted)| &outputs[id].0 == wanted));
    let load = scheduler.load();
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.free_pages), (0, 0, 0, load.pages), "{load:?}");
});

backend_test!(where_pages_run_out_the_client_that_has_most_is_preempted::<B>(device) {
    let model = model::<B>(&device)?;
    // Five of one client hold all pages when one of another arrives.
    let mut scheduler = Scheduler::new(&model, SchedulerOptions { cache_tokens: 10 * 64, ..ROOMY }, device.clone());
    let request = |client, length: u32, more| {
        let prompt = (0..length).map(|at| (at * 7 + client as u32) % VOCABULARY as u32).collect();
        Request { client, ..Request::new(prompt, more) }
    };
    let mut outputs = Outputs::new();
    let many = (0..5).map(|_| scheduler.add(request(1, 60, 250))).collect::<Result<Vec<_>, _>>()?;
    while scheduler.load().decoding < 5 {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    let one = request(2, 60, 60);
    let wanted = alone(&model, &one, &device)?;
    let id = scheduler.add(one)?;
    while outputs.get(&id).is_none_or(|(_, finish)| finish.is_none()) {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    assert_eq!(outputs[&id].0, wanted);
    assert!(scheduler.load().preemptions > 0);
    assert!(many.iter().all(|id| outputs[id].1.is_none()), "it came last and is complete first");
    while !scheduler.is_idle() {
        step(&mut scheduler, &model, &mut outputs)?;
    }
    assert!(many.iter().all(|id| outputs[id].0.len() == 250));
});

backend_test!(log_probabilities_of_prompts_are_those_of_the_model::<B>(device) {
    let model = model::<B>(&device)?;
    let prompts: Vec<Vec<u32>> =
        [1, 2, 48, 49, 300].map(|length| (0..length).map(|at| at * 7 % VOCABULARY as u32).collect()).into();
    // Prefilled in parts of steps, among decoding sequences, and with pages running out.
    for cache_tokens in [ROOMY.cache_tokens, 6 * 64] {
        let mut scheduler = Scheduler::new(&model, SchedulerOptions { cache_tokens, ..ROOMY }, device.clone());
        let ask = |prompt: &Vec<u32>| Request { prompt_top_logprobs: Some(2), ..Request::new(prompt.clone(), 20) };
        let plain = scheduler.add(Request::new(prompts[3].clone(), 40))?;
        let ids = prompts.iter().map(|prompt| scheduler.add(ask(prompt))).collect::<Result<Vec<_>, _>>()?;
        let mut told: BTreeMap<RequestId, Vec<OutputToken>> = BTreeMap::new();
        while !scheduler.is_idle() {
            scheduler.step(&model)?;
            for written in scheduler.take() {
                assert!(written.id != plain || written.prompt.is_empty());
                told.entry(written.id).or_default().extend(written.prompt);
            }
        }
        for (id, prompt) in ids.iter().zip(&prompts) {
            let told = &told[id];
            assert_eq!(told.len(), if prompt.len() == 1 { 0 } else { prompt.len() });
            assert!(told.iter().map(|known| known.token).eq(prompt[..told.len()].iter().copied()));
            let ids =
                Tensor::<B, 1, Int>::from_ints(&prompt.iter().map(|id| *id as i32).collect::<Vec<_>>()[..], &device);
            let logits = model.logits(model.forward(ids.reshape([1, prompt.len()])));
            let wanted = crate::compare::values(&log_softmax(logits, 2));
            for (at, known) in told.iter().enumerate() {
                let Some(own) = known.log_probability else {
                    assert_eq!(at, 0);
                    continue;
                };
                let row = &wanted[(at - 1) * VOCABULARY..at * VOCABULARY];
                let mut sorted = row.to_vec();
                sorted.sort_by(f32::total_cmp);
                assert!((own - row[known.token as usize]).abs() < 2e-3, "token {at}");
                assert_eq!(known.top_logprobs.len(), 2);
                for (place, (token, log_probability)) in known.top_logprobs.iter().enumerate() {
                    assert!((log_probability - row[*token as usize]).abs() < 2e-3, "token {at}");
                    assert!((log_probability - sorted[VOCABULARY - 1 - place]).abs() < 2e-3, "token {at}");
                }
            }
        }
    }
});

backend_test!(log_probabilities_are_those_of_the_model::<B>(device) {
    let model = model::<B>(&device)?;
    let sampling = Sampling::greedy().with_temperature(1.5).with_seed(4, 0).with_top_k(Some(40));
    let request = Request { sampling, top_logprobs: Some(3), ..Request::new(vec![4, 5, 6], 6) };
    let mut scheduler = Scheduler::new(&model, ROOMY, device.clone());
    // Together with a request without log-probabilities.
    let plain = scheduler.add(Request::new(vec![9, 9], 4)).expect("it fits");
    let id = scheduler.add(request.clone()).expect("it fits");
    let mut tokens: Vec<OutputToken> = Vec::new();
    while !scheduler.is_idle() {
        scheduler.step(&model)?;
        for written in scheduler.take() {
            match written.id == id {
                true => tokens.extend(written.tokens),
                false => assert!(
                    written.id == plain
                        && written
                            .tokens
                            .iter()
                            .all(|token| token.log_probability.is_none() && token.top_logprobs.is_empty())
                ),
            }
        }
    }
    assert_eq!(tokens.len(), 6);
    let mut text: Vec<i32> = request.prompt.iter().map(|token| *token as i32).collect();
    for written in tokens {
        let ids = burn::tensor::TensorData::new(text.clone(), [1, text.len()]);
        let hidden = model.forward(burn::tensor::Tensor::<B, 2, burn::tensor::Int>::from_data(ids, &device));
        let logits = model.logits(hidden.narrow(1, text.len() - 1, 1));
        let exact: Vec<f32> = burn::tensor::activation::log_softmax(logits, 2).into_data().iter::<f32>().collect();
        let close =
            |(token, value): (u32, f32)| assert!((exact[token as usize] - value).abs() < 1e-3, "{token}: {value}");
        close((written.token, written.log_probability.expect("it was asked for")));
        let mut best: Vec<u32> = (0..VOCABULARY as u32).collect();
        best.sort_by(|a, b| exact[*b as usize].total_cmp(&exact[*a as usize]));
        assert_eq!(written.top_logprobs.iter().map(|(token, _)| *token).collect::<Vec<_>>(), best[..3]);
        written.top_logprobs.into_iter().for_each(close);
        text.push(written.token as i32);
    }
});

backend_test!(requests_that_can_never_be_written_are_refused::<B>(device) {
    let model = model::<B>(&device)?;
    let tight = SchedulerOptions { cache_tokens: 2 * 64, ..ROOMY };
    let mut scheduler = Scheduler::new(&model, tight, device.clone());
    let mut refused = |request: Request, part: &str| {
        let failure = scheduler.add(request).expect_err(part).to_string();
        assert!(failure.contains(part) && !failure.contains('\n'), "{failure}");
    };
    refused(Request::new(vec![], 5), "needs a prompt of at least one token");
    refused(Request::new(vec![1], 0), "max_tokens of at least 1");
    refused(Request::new(vec![90], 5), "token 90 is outside the model's vocabulary, 0 to 89");
    refused(Request { biases: vec![(400, 1.0)], ..Request::new(vec![1], 5) }, "token 400 is outside");
    let sampling = fireclay_kernels::Sampling::greedy().with_temperature(1e39);
    refused(Request { sampling, ..Request::new(vec![1], 5) }, "a temperature of 1000");
    refused(Request { top_logprobs: Some(21), ..Request::new(vec![1], 5) }, "20 is the maximum number");
    refused(Request::new(vec![1; 300], 21), "the model's context is 320");
    refused(Request::new(vec![1; 100], 29), "the cache holds 128");
    assert!(scheduler.is_idle());
});

#[test]
fn rows_that_come_and_go_leave_nothing_behind() {
    type B = burn::backend::NdArray;
    // `FIRECLAY_TEST_ROWS` sets their number.
    let count = std::env::var("FIRECLAY_TEST_ROWS").ok().and_then(|count| count.parse().ok()).unwrap_or(1000);
    let device = Default::default();
    let config = TransformerConfig::llama(16, 320, 8, 1, 1);
    let model: Transformer<B> = config.init(3, &device).expect("a model");
    let options = SchedulerOptions { rows: 16, step_tokens: 256, cache_tokens: 12 * 64 };
    let mut scheduler = Scheduler::new(&model, options, device);
    let mut numbers = Numbers(3);
    let mut alive: Vec<RequestId> = Vec::new();
    let mut added = 0;
    while added < count || !scheduler.is_idle() {
        while added < count && scheduler.load().waiting < 20 {
            let prompt = (0..1 + numbers.below(100)).map(|at| (at % 3) as u32).collect();
            let penalties = Penalties { presence: (added % 2) as f64, ..Penalties::default() };
            let sampling =
                Sampling::greedy().with_temperature(1.0).with_seed(added as u64, 0).with_penalties(penalties);
            let request = Request { sampling, stop_tokens: vec![5], ..Request::new(prompt, 1 + numbers.below(20)) };
            alive.push(scheduler.add(request).expect("it fits"));
            added += 1;
        }
        scheduler.step(&model).expect("a step");
        for written in scheduler.take() {
            if written.finish.is_some() {
                alive.retain(|id| *id != written.id);
            }
        }
        if !alive.is_empty() && numbers.below(4) == 0 {
            scheduler.cancel(alive.swap_remove(numbers.below(alive.len())));
        }
    }
    let load = scheduler.load();
    assert_eq!((load.waiting, load.prefilling, load.decoding, load.free_pages), (0, 0, 0, load.pages));
}
