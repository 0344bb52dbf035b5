//! One pass of the model over a step's tokens, and what it draws.

use std::time::Instant;

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::{
    Backend, Download, SampledRow, SampledRows, Sampling, StepsAhead, download_float, download_int, recorder,
};
use fireclay_model::{RowId, Transformer};

use super::log_probabilities::{Known, LogProbabilities, PromptLogProbabilities};
use super::{Drawn, Ends, Finish, RequestId, Scheduler, TOKENS_AHEAD, Text, Written, WrittenToken};
use crate::failure::Failure;

impl<B: Backend> Scheduler<B> {
    /// Runs the model over one token of each text that is `writing`, and over tokens of those that are being read.
    pub(super) fn pass(&mut self, model: &Transformer<B>, writing: &[usize], reads: &[(usize, usize)]) {
        self.filter(writing, reads);
        let most_ahead = if reads.is_empty() { self.most_ahead(writing) } else { 1 };
        let ends = (most_ahead > 1).then(|| self.ends_of(writing));
        let writing_rows: Vec<RowId> = writing.iter().filter_map(|at| self.running[*at].row).collect();
        let decode = (!writing.is_empty()).then(|| self.last_tokens(writing));
        let prefill: Vec<(RowId, &[u32])> = reads
            .iter()
            .filter_map(|(at, count)| {
                let text = &self.running[*at];
                let row = text.row?;
                let from = text.begin + self.cache.length(row);
                Some((row, &text.tokens[from..from + count]))
            })
            .collect();
        // What a prompt's chunks draw before its end is not used.
        let mut likeliest = None;
        let mut sampled: Vec<SampledRow> = Vec::new();
        let mut texts: Vec<(usize, RequestId)> = Vec::new();
        let places = writing.iter().map(|at| (*at, 1)).chain(reads.iter().copied());
        for (place, (at, count)) in places.enumerate() {
            let text = &self.running[at];
            let read = text.row.map_or(0, |row| text.begin + self.cache.length(row)) + count;
            if (text.drawn_at.is_some() || read >= text.tokens.len()) && !text.finished {
                likeliest = likeliest.max(text.request.likeliest);
                sampled.push(SampledRow { sampling: text.sampling(), line: text.line });
                texts.push((place, text.id));
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
        let (tokens, last, log_probabilities) = match (decode, &ends) {
            (Some(first), Some(ends)) => {
                let most = StepsAhead { steps: most_ahead, ends: Some(ends) };
                let ahead = model.tokens_ahead(first, &writing_rows, most, &rows, counts, cache);
                (ahead.tokens, ahead.last, None)
            }
            (decode, _) => {
                let decode = decode.map(|tokens| (tokens, &writing_rows[..]));
                let (tokens, logits) = if reads.iter().any(|(at, _)| self.running[*at].awaits_prompt()) {
                    let next = model.next_tokens_and_states(decode, &prefill, &rows, counts, cache);
                    prompt_states = next.prompt_states;
                    (next.tokens, next.logits)
                } else {
                    model.next_tokens(decode, &prefill, &rows, counts, cache)
                };
                let log_probabilities = likeliest.map(|count| LogProbabilities::of(logits, tokens.clone(), count));
                (tokens.clone().unsqueeze(), tokens, log_probabilities)
            }
        };
        let prompts = prompt_states.map_or_else(Vec::new, |states| self.prompts(model, reads, states));
        let [steps, _] = tokens.dims();
        for (place, id) in &texts {
            if let Some(text) = self.running.iter_mut().find(|text| text.id == *id) {
                text.drawn_at = Some(*place);
                text.drawn += steps;
            }
        }
        self.sampled = Some((sampled, rows));
        self.drawn = Some(last);
        // Prompts that are read are there for others.
        for (at, _) in reads {
            let text = &self.running[*at];
            if let Some(row) = text.row.filter(|_| text.begin == 0) {
                self.cache.make_known(row, &text.tokens);
            }
        }
        if !texts.is_empty() || !prompts.is_empty() {
            let log_probabilities = log_probabilities.map(|LogProbabilities { tokens, values }| {
                let floats = download_float(values);
                (download_int(tokens), floats)
            });
            let tokens = download_int(tokens);
            self.on_the_way.push_back(Drawn { tokens, steps, texts, log_probabilities, prompts });
        }
    }

    /// Log-probabilities of the tokens of prompts that were just read, by the hidden states of all
    /// of them.
    fn prompts(
        &mut self,
        model: &Transformer<B>,
        reads: &[(usize, usize)],
        states: Tensor<B, 2>,
    ) -> Vec<PromptLogProbabilities> {
        let (mut begin, mut prompts) = (0, Vec::new());
        for (at, count) in reads {
            let text = &mut self.running[*at];
            let end = text.row.map_or(0, |row| self.cache.length(row));
            // Each state says how likely the token behind it is.
            let first = (end - count).max(text.prompt_known);
            let last = end.min(text.prompt_length().saturating_sub(1));
            if let Some(likeliest) = text.request.prompt_likeliest.filter(|_| text.begin == 0 && first < last) {
                let states = states.clone().narrow(0, begin + first - (end - count), last - first);
                let tokens = &text.tokens[first + 1..=last];
                let mut prompt = PromptLogProbabilities::of(model, (text.id, likeliest), states, tokens);
                prompt.begins = first == 0;
                prompts.push(prompt);
                text.prompt_known = last;
            }
            begin += count;
        }
        prompts
    }

    /// The last tokens of texts: those that the last step drew, or, of texts that it drew none of, the last ones that are known.
    fn last_tokens(&self, writing: &[usize]) -> Tensor<B, 1, Int> {
        let on_device = |tokens: Vec<i32>| {
            let count = tokens.len();
            Tensor::from_data(TensorData::new(tokens, [count]), &self.device)
        };
        let drawn = self.drawn.as_ref().map_or(0, |drawn| drawn.dims()[0]);
        let mut known = Vec::new();
        let mut place = |at: &usize| {
            let Text { drawn_at, tokens, .. } = &self.running[*at];
            drawn_at.unwrap_or_else(|| {
                known.extend(tokens.last().map(|token| *token as i32));
                drawn + known.len() - 1
            })
        };
        let places: Vec<usize> = writing.iter().map(&mut place).collect();
        let count = drawn + known.len();
        let known = (!known.is_empty()).then(|| on_device(known));
        let mut tokens: Vec<Tensor<B, 1, Int>> = self.drawn.iter().cloned().chain(known).collect();
        let tokens = if tokens.len() == 1 { tokens.remove(0) } else { Tensor::cat(tokens, 0) };
        if places.iter().copied().eq(0..count) {
            return tokens;
        }
        tokens.gather(0, on_device(places.into_iter().map(|place| place as i32).collect()))
    }

    /// The most tokens that texts are given in a step that reads no prompts: one, where anything waits for its end, or has to be known of it.
    fn most_ahead(&self, writing: &[usize]) -> usize {
        let texts = || writing.iter().map(|at| &self.running[*at]);
        let one = |text: &Text| text.filter.is_some() || text.request.likeliest.is_some();
        let waits = !self.waiting.is_empty() || self.running.iter().any(|text| !text.has_turn);
        if !self.cache.goes_ahead(writing.len(), false) || waits || texts().any(one) {
            return 1;
        }
        let left = texts().map(|text| text.request.max_tokens - text.drawn);
        left.fold(TOKENS_AHEAD, usize::min)
    }

    /// Tokens that end each of the texts, on the device.
    fn ends_of(&mut self, writing: &[usize]) -> Tensor<B, 2, Int> {
        let of_texts: Vec<Vec<u32>> = writing.iter().map(|at| self.running[*at].request.ends.clone()).collect();
        match &self.ends {
            Some(same) if same.of_texts == of_texts => same.on_device.clone(),
            _ => {
                let on_device = StepsAhead::<B>::ends_of(&of_texts, &self.device);
                self.ends = Some(Ends { of_texts, on_device: on_device.clone() });
                on_device
            }
        }
    }

    /// Keeps out what the filters of texts do not allow that draw a token in this step. A text whose filter cannot say is
    /// finished.
    fn filter(&mut self, writing: &[usize], reads: &[(usize, usize)]) {
        let Some(counts) = &mut self.counts else { return };
        let last_reads = reads.iter().filter(|(at, count)| {
            let text = &self.running[*at];
            let read = text.row.map_or(0, |row| text.begin + self.cache.length(row));
            read + count >= text.tokens.len()
        });
        let draw: Vec<usize> = writing.iter().chain(last_reads.map(|(at, _)| at)).copied().collect();
        for at in draw {
            let text = &mut self.running[at];
            let (Some(filter), Some(line)) = (&mut text.filter, text.line) else { continue };
            match filter.allowed() {
                Ok(allowed) => counts.allow(line, &allowed, &text.request.biases),
                Err(_) => {
                    text.finished = true;
                    let id = text.id;
                    self.ready.entry(id).or_insert_with(|| Written::nothing(id)).finish = Some(Finish::Filter);
                }
            }
        }
    }

    /// Reads the tokens of all steps but the last `left`, and gives them to the texts that are not finished.
    pub(super) fn read(&mut self, left: usize) -> Result<(), Failure> {
        self.last_read = Instant::now();
        let beside = left > 0 && B::downloads_at_once();
        let mut bytes = 0;
        let mut wait = |download: Download| {
            let data = download.wait().map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            bytes += data.bytes.len();
            if beside {
                recorder::waited_beside();
            }
            Ok::<_, Failure>(data)
        };
        let read = self.on_the_way.len().saturating_sub(left);
        let begun: Vec<Drawn> = self.on_the_way.drain(..read).map(Drawn::begin).collect();
        let (mut drawn, mut known_prompts) = (Vec::new(), Vec::new());
        for Drawn { tokens, steps, texts, log_probabilities, prompts } in begun {
            for prompt in prompts {
                let (id, begins) = (prompt.id, prompt.begins);
                known_prompts.push((id, begins, prompt.known(&mut wait)?));
            }
            let tokens: Vec<i64> = wait(tokens)?.iter().collect();
            let known = match log_probabilities {
                Some((tokens, values)) => Some(Known::new(wait(tokens)?, wait(values)?)),
                None => None,
            };
            drawn.push((tokens, steps, texts, known));
        }
        if bytes > 0 {
            recorder::read_back(bytes);
        }
        for (id, begins, known) in known_prompts {
            self.push_prompt(id, begins, known);
        }
        for (tokens, steps, texts, known) in drawn {
            for step in tokens.chunks_exact((tokens.len() / steps).max(1)) {
                for (place, id) in &texts {
                    let token = step.get(*place).copied().unwrap_or(-1);
                    self.push(*id, token, known.as_ref().map(|known| known.row(*place)));
                }
            }
        }
        // Those that are finished give up their rows.
        let (gone, running): (Vec<Text>, _) =
            std::mem::take(&mut self.running).into_iter().partition(|text| text.finished);
        self.running = running;
        gone.into_iter().for_each(|text| drop(self.taken_back(text)));
        Ok(())
    }

    /// More tokens of a prompt, with their log-probabilities, unless the text is gone. The first of
    /// all has none.
    fn push_prompt(&mut self, id: RequestId, begins: bool, known: Vec<WrittenToken>) {
        let Some(text) = self.running.iter().find(|text| text.id == id) else { return };
        let ready = self.ready.entry(id).or_insert_with(|| Written::nothing(id));
        if begins {
            ready.prompt.extend(text.tokens.first().map(|first| WrittenToken::plain(*first)));
        }
        ready.prompt.extend(known);
    }

    /// One more token of a text, unless it is finished; -1 is what the device draws from logits that are NaN.
    fn push(&mut self, id: RequestId, token: i64, log_probabilities: Option<&[(u32, f32)]>) {
        let Some(text) = self.running.iter_mut().find(|text| text.id == id && !text.finished) else { return };
        let ready = self.ready.entry(id).or_insert_with(|| Written::nothing(id));
        ready.cached = text.cached.take().or(ready.cached);
        match u32::try_from(token) {
            Ok(token) => {
                text.tokens.push(token);
                let asked = text.request.likeliest.zip(log_probabilities);
                ready.tokens.push(match asked {
                    Some((count, known)) => WrittenToken { token, ..WrittenToken::of(known, count) },
                    None => WrittenToken::plain(token),
                });
                let filtered = text.filter.as_mut().map(|filter| filter.push(token));
                if let Some(Err(_)) = filtered {
                    ready.finish = Some(Finish::Filter);
                } else if text.request.ends.contains(&token) {
                    ready.finish = Some(Finish::End);
                } else if let Some(Ok(true)) = filtered {
                    ready.finish = Some(Finish::Complete);
                } else if text.tokens.len() - text.prompt_length() >= text.request.max_tokens {
                    ready.finish = Some(Finish::Length);
                }
            }
            Err(_) => ready.finish = Some(Finish::NotANumber),
        }
        text.finished = ready.finish.is_some();
    }
}
