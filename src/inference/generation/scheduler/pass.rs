//! One forward pass over a step's tokens, with sampling.

use std::time::Instant;

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::{
    Backend, Download, MultiStep, SampledRow, SampledRows, Sampling, download_float, download_int, recorder,
};
use fireclay_model::{RowId, Transformer};

use super::log_probabilities::{Known, LogProbabilities, PromptLogProbabilities};
use super::{Drawn, Finish, MAX_STEPS, OutputToken, RequestId, RequestOutput, Scheduler, Sequence, StopTokens};
use crate::failure::Failure;

impl<B: Backend> Scheduler<B> {
    /// Runs the model over one token of each `decoding` sequence and over the tokens of `prefills`.
    pub(super) fn pass(&mut self, model: &Transformer<B>, decoding: &[usize], prefills: &[(usize, usize)]) {
        self.filter(decoding, prefills);
        let max_steps = if prefills.is_empty() { self.max_steps(decoding) } else { 1 };
        let stop_tokens = (max_steps > 1).then(|| self.stop_tokens_of(decoding));
        let decode_rows: Vec<RowId> = decoding.iter().filter_map(|at| self.running[*at].row).collect();
        let decode = (!decoding.is_empty()).then(|| self.last_tokens(decoding));
        let prefill: Vec<(RowId, &[u32])> = prefills
            .iter()
            .filter_map(|(at, count)| {
                let sequence = &self.running[*at];
                let row = sequence.row?;
                let from = sequence.begin + self.cache.length(row);
                Some((row, &sequence.tokens[from..from + count]))
            })
            .collect();
        // Samples of unfinished prompts are dropped.
        let mut top_logprobs = None;
        let mut sampled: Vec<SampledRow> = Vec::new();
        let mut sequences: Vec<(usize, RequestId)> = Vec::new();
        let places = decoding.iter().map(|at| (*at, 1)).chain(prefills.iter().copied());
        for (place, (at, count)) in places.enumerate() {
            let sequence = &self.running[at];
            let read = sequence.row.map_or(0, |row| sequence.begin + self.cache.length(row)) + count;
            if (sequence.drawn_at.is_some() || read >= sequence.tokens.len()) && !sequence.finished {
                top_logprobs = top_logprobs.max(sequence.request.top_logprobs);
                sampled.push(SampledRow { sampling: sequence.sampling(), line: sequence.line });
                sequences.push((place, sequence.id));
            } else {
                sampled.push(Sampling::greedy().into());
            }
        }
        let rows = match self.sampled.take() {
            Some((same, rows)) if same == sampled => rows,
            _ => SampledRows::new(&sampled, &self.device),
        };
        let (counts, cache) = (self.counts.as_mut(), &mut self.cache);
        let mut prompt_states = None;
        let (tokens, last, log_probabilities) = match (decode, &stop_tokens) {
            (Some(first), Some(stop_tokens)) => {
                let most = MultiStep { steps: max_steps, stop_tokens: Some(stop_tokens) };
                let ahead = model.decode_multi_step(first, &decode_rows, most, &rows, counts, cache);
                (ahead.tokens, ahead.last, None)
            }
            (decode, _) => {
                let decode = decode.map(|tokens| (tokens, &decode_rows[..]));
                let (tokens, logits) = if prefills.iter().any(|(at, _)| self.running[*at].awaits_prompt()) {
                    let next = model.next_tokens_and_states(decode, &prefill, &rows, counts, cache);
                    prompt_states = next.prompt_states;
                    (next.tokens, next.logits)
                } else {
                    model.next_tokens(decode, &prefill, &rows, counts, cache)
                };
                let log_probabilities = top_logprobs.map(|count| LogProbabilities::of(logits, tokens.clone(), count));
                (tokens.clone().unsqueeze(), tokens, log_probabilities)
            }
        };
        let prompts = prompt_states.map_or_else(Vec::new, |states| self.prompts(model, prefills, states));
        let [steps, _] = tokens.dims();
        for (place, id) in &sequences {
            if let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == *id) {
                sequence.drawn_at = Some(*place);
                sequence.drawn += steps;
            }
        }
        self.sampled = Some((sampled, rows));
        self.drawn = Some(last);
        // Share computed prompt pages with other sequences.
        for (at, _) in prefills {
            let sequence = &self.running[*at];
            if let Some(row) = sequence.row.filter(|_| sequence.begin == 0) {
                self.cache.share_prefix(row, &sequence.tokens);
            }
        }
        if !sequences.is_empty() || !prompts.is_empty() {
            let log_probabilities = log_probabilities.map(|LogProbabilities { tokens, values }| {
                let floats = download_float(values);
                (download_int(tokens), floats)
            });
            let tokens = download_int(tokens);
            self.in_flight.push_back(Drawn { tokens, steps, sequences, log_probabilities, prompts });
        }
    }

    /// Log-probabilities of the prompt tokens of this pass, from its hidden states.
    fn prompts(
        &mut self,
        model: &Transformer<B>,
        prefills: &[(usize, usize)],
        states: Tensor<B, 2>,
    ) -> Vec<PromptLogProbabilities> {
        let (mut begin, mut prompts) = (0, Vec::new());
        for (at, count) in prefills {
            let sequence = &mut self.running[*at];
            let end = sequence.row.map_or(0, |row| self.cache.length(row));
            // Each state predicts the token after it.
            let first = (end - count).max(sequence.prompt_known);
            let last = end.min(sequence.prompt_length().saturating_sub(1));
            if let Some(top_logprobs) =
                sequence.request.prompt_top_logprobs.filter(|_| sequence.begin == 0 && first < last)
            {
                let states = states.clone().narrow(0, begin + first - (end - count), last - first);
                let tokens = &sequence.tokens[first + 1..=last];
                let mut prompt = PromptLogProbabilities::of(model, (sequence.id, top_logprobs), states, tokens);
                prompt.begins = first == 0;
                prompts.push(prompt);
                sequence.prompt_known = last;
            }
            begin += count;
        }
        prompts
    }

    /// The last tokens of sequences: those sampled by the last step, else those known on the host.
    fn last_tokens(&self, decoding: &[usize]) -> Tensor<B, 1, Int> {
        let on_device = |tokens: Vec<i32>| {
            let count = tokens.len();
            Tensor::from_data(TensorData::new(tokens, [count]), &self.device)
        };
        let drawn = self.drawn.as_ref().map_or(0, |drawn| drawn.dims()[0]);
        let mut known = Vec::new();
        let mut place = |at: &usize| {
            let Sequence { drawn_at, tokens, .. } = &self.running[*at];
            drawn_at.unwrap_or_else(|| {
                known.extend(tokens.last().map(|token| *token as i32));
                drawn + known.len() - 1
            })
        };
        let places: Vec<usize> = decoding.iter().map(&mut place).collect();
        let count = drawn + known.len();
        let known = (!known.is_empty()).then(|| on_device(known));
        let mut tokens: Vec<Tensor<B, 1, Int>> = self.drawn.iter().cloned().chain(known).collect();
        let tokens = if tokens.len() == 1 { tokens.remove(0) } else { Tensor::cat(tokens, 0) };
        if places.iter().copied().eq(0..count) {
            return tokens;
        }
        tokens.gather(0, on_device(places.into_iter().map(|place| place as i32).collect()))
    }

    /// Maximum tokens per sequence in a step without prefill: one if other sequences wait, or if a
    /// token must be read before the next.
    fn max_steps(&self, decoding: &[usize]) -> usize {
        let sequences = || decoding.iter().map(|at| &self.running[*at]);
        let one = |sequence: &Sequence| sequence.filter.is_some() || sequence.request.top_logprobs.is_some();
        let waits = !self.waiting.is_empty() || self.running.iter().any(|sequence| !sequence.has_slot);
        if !self.cache.supports_multi_step(decoding.len(), false) || waits || sequences().any(one) {
            return 1;
        }
        let left = sequences().map(|sequence| sequence.request.max_tokens - sequence.drawn);
        left.fold(MAX_STEPS, usize::min)
    }

    /// Copies the stop tokens of the next step with the prompts, so that decoding sends nothing to
    /// the device.
    pub(super) fn prepare_multi_step(&mut self) {
        let decoding = self.decoding();
        if !decoding.is_empty() && self.max_steps(&decoding) > 1 {
            self.stop_tokens_of(&decoding);
        }
    }

    /// Stop tokens of the sequences, on the device.
    fn stop_tokens_of(&mut self, decoding: &[usize]) -> Tensor<B, 2, Int> {
        let of_sequences: Vec<Vec<u32>> =
            decoding.iter().map(|at| self.running[*at].request.stop_tokens.clone()).collect();
        match &self.stop_tokens {
            Some(same) if same.of_sequences == of_sequences => same.on_device.clone(),
            _ => {
                let on_device = MultiStep::<B>::pad_stop_tokens(&of_sequences, &self.device);
                self.stop_tokens = Some(StopTokens { of_sequences, on_device: on_device.clone() });
                on_device
            }
        }
    }

    /// Masks tokens that the filters of this step's sequences forbid. A sequence whose filter fails
    /// is finished.
    fn filter(&mut self, decoding: &[usize], prefills: &[(usize, usize)]) {
        let Some(counts) = &mut self.counts else { return };
        let last_reads = prefills.iter().filter(|(at, count)| {
            let sequence = &self.running[*at];
            let read = sequence.row.map_or(0, |row| sequence.begin + self.cache.length(row));
            read + count >= sequence.tokens.len()
        });
        let draw: Vec<usize> = decoding.iter().chain(last_reads.map(|(at, _)| at)).copied().collect();
        for at in draw {
            let sequence = &mut self.running[at];
            let (Some(filter), Some(line)) = (&mut sequence.filter, sequence.line) else { continue };
            match filter.allowed() {
                Ok(allowed) => counts.allow(line, &allowed, &sequence.request.biases),
                Err(_) => {
                    sequence.finished = true;
                    let id = sequence.id;
                    self.ready.entry(id).or_insert_with(|| RequestOutput::nothing(id)).finish = Some(Finish::Filter);
                }
            }
        }
    }

    /// Reads the tokens of all steps but the last `left`, and appends them to their unfinished
    /// sequences.
    pub(super) fn read(&mut self, left: usize) -> Result<(), Failure> {
        self.last_read = Instant::now();
        let overlapped = left > 0 && B::downloads_at_once();
        let mut bytes = 0;
        let mut wait = |download: Download| {
            let data = download.wait().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            bytes += data.bytes.len();
            if overlapped {
                recorder::waited_while_busy();
            }
            Ok::<_, Failure>(data)
        };
        let read = self.in_flight.len().saturating_sub(left);
        let begun: Vec<Drawn> = self.in_flight.drain(..read).map(Drawn::begin).collect();
        let (mut drawn, mut known_prompts) = (Vec::new(), Vec::new());
        for Drawn { tokens, steps, sequences, log_probabilities, prompts } in begun {
            for prompt in prompts {
                let (id, begins) = (prompt.id, prompt.begins);
                known_prompts.push((id, begins, prompt.known(&mut wait)?));
            }
            let tokens: Vec<i64> = wait(tokens)?.iter().collect();
            let known = match log_probabilities {
                Some((tokens, values)) => Some(Known::new(wait(tokens)?, wait(values)?)),
                None => None,
            };
            drawn.push((tokens, steps, sequences, known));
        }
        if bytes > 0 {
            recorder::read_back(bytes);
        }
        for (id, begins, known) in known_prompts {
            self.push_prompt(id, begins, known);
        }
        for (tokens, steps, sequences, known) in drawn {
            for step in tokens.chunks_exact((tokens.len() / steps).max(1)) {
                for (place, id) in &sequences {
                    let token = step.get(*place).copied().unwrap_or(-1);
                    self.push(*id, token, known.as_ref().map(|known| known.row(*place)));
                }
            }
        }
        // Finished sequences release their rows.
        let (gone, running): (Vec<Sequence>, _) =
            std::mem::take(&mut self.running).into_iter().partition(|sequence| sequence.finished);
        self.running = running;
        gone.into_iter().for_each(|sequence| drop(self.release(sequence)));
        Ok(())
    }

    /// Appends prompt tokens with log-probabilities, unless the sequence is gone. The first token
    /// has none.
    fn push_prompt(&mut self, id: RequestId, begins: bool, known: Vec<OutputToken>) {
        let Some(sequence) = self.running.iter().find(|sequence| sequence.id == id) else { return };
        let ready = self.ready.entry(id).or_insert_with(|| RequestOutput::nothing(id));
        if begins {
            ready.prompt.extend(sequence.tokens.first().map(|first| OutputToken::plain(*first)));
        }
        ready.prompt.extend(known);
    }

    /// Appends a token to an unfinished sequence; the device samples -1 from NaN logits.
    fn push(&mut self, id: RequestId, token: i64, log_probabilities: Option<&[(u32, f32)]>) {
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id && !sequence.finished) else {
            return;
        };
        let ready = self.ready.entry(id).or_insert_with(|| RequestOutput::nothing(id));
        ready.cached = sequence.cached.take().or(ready.cached);
        match u32::try_from(token) {
            Ok(token) => {
                sequence.tokens.push(token);
                let asked = sequence.request.top_logprobs.zip(log_probabilities);
                ready.tokens.push(match asked {
                    Some((count, known)) => OutputToken { token, ..OutputToken::of(known, count) },
                    None => OutputToken::plain(token),
                });
                let filtered = sequence.filter.as_mut().map(|filter| filter.push(token));
                if let Some(Err(_)) = filtered {
                    ready.finish = Some(Finish::Filter);
                } else if sequence.request.stop_tokens.contains(&token) {
                    ready.finish = Some(Finish::End);
                } else if let Some(Ok(true)) = filtered {
                    ready.finish = Some(Finish::Complete);
                } else if sequence.tokens.len() - sequence.prompt_length() >= sequence.request.max_tokens {
                    ready.finish = Some(Finish::Length);
                }
            }
            Err(_) => ready.finish = Some(Finish::NotANumber),
        }
        sequence.finished = ready.finish.is_some();
    }
}
