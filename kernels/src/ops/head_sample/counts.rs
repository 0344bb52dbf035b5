//! Token counts and sampling parameters of rows.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, ElementConversion, Int, Tensor, TensorData};

use super::{MOST_TOKENS, Sampling};
use crate::checked::{Part, part};

/// Numbers per row on the device: temperature, top-k, top-p, the logarithm of min-p, and three
/// penalties.
pub(crate) const NUMBERS: usize = 7;

/// Token counts of sequences and biases of logits, on the device: f32, `[lines, vocabulary]`, a
/// line per sequence.
#[derive(Clone, Debug)]
pub struct TokenCounts<B: Backend> {
    /// Counts in the prompt.
    pub prompt: Tensor<B, 2>,
    /// Counts in the generated tokens.
    pub written: Tensor<B, 2>,
    /// Biases of logits; [`FORBIDDEN`](Self::FORBIDDEN) excludes a token.
    pub bias: Tensor<B, 2>,
}

impl<B: Backend> TokenCounts<B> {
    /// A bias that excludes a token.
    pub const FORBIDDEN: f32 = -1e30;

    /// Zeroed lines for `lines` sequences of tokens in `0..vocabulary`.
    pub fn new(lines: usize, vocabulary: usize, device: &B::Device) -> Self {
        // Flat first: some devices pad the rows of a matrix.
        let zeros = || Tensor::<B, 1>::zeros([lines * vocabulary], (device, DType::F32)).reshape([lines, vocabulary]);
        Self { prompt: zeros(), written: zeros(), bias: zeros() }
    }

    /// For prompts, one per line, without biases.
    ///
    /// # Panics
    /// If a token is outside of the vocabulary.
    pub fn of_prompts(prompts: &[&[u32]], vocabulary: usize, device: &B::Device) -> Self {
        let mut counts = Self::new(prompts.len(), vocabulary, device);
        prompts.iter().enumerate().for_each(|(line, prompt)| counts.begin(line, prompt, &[], &[]));
        counts
    }

    /// Starts a sequence in a line, with its prompt, the generated tokens `written`, and biases of
    /// tokens.
    ///
    /// # Panics
    /// If a token is outside of the vocabulary, or the line does not exist.
    pub fn begin(&mut self, line: usize, prompt: &[u32], written: &[u32], biases: &[(u32, f32)]) {
        let [lines, vocabulary] = self.prompt.dims();
        assert!(line < lines, "head_sample: line {line} of {lines}");
        for (all, tokens) in [(&mut self.prompt, prompt), (&mut self.written, written)] {
            let mut counts = vec![0u32; vocabulary];
            for token in tokens {
                counts[known(*token, vocabulary)] += 1;
            }
            let counts = numbers(&counts, &all.device());
            all.inplace(|all| all.slice_assign([line..line + 1, 0..vocabulary], counts));
        }
        let bias = biases_of(biases, vocabulary, &self.bias.device());
        self.bias.inplace(|all| all.slice_assign([line..line + 1, 0..vocabulary], bias));
    }

    /// Restricts a line's next token to `allowed`, one bit per token, 32 per word, lowest first,
    /// and sets `biases`. Valid until the next call, or [`begin`](Self::begin).
    ///
    /// # Panics
    /// If a biased token is outside of the vocabulary, the line does not exist, or there are fewer
    /// bits than tokens.
    pub fn allow(&mut self, line: usize, allowed: &[u32], biases: &[(u32, f32)]) {
        let [lines, vocabulary] = self.bias.dims();
        assert!(line < lines, "head_sample: line {line} of {lines}");
        let words = vocabulary.div_ceil(32);
        assert!(allowed.len() >= words, "head_sample: {} words of bits for {vocabulary} tokens", allowed.len());
        let device = self.bias.device();
        // Uploads the bits, a thirty-second of the resulting biases.
        let words = allowed[..words].iter().map(|word| word.cast_signed()).collect();
        let mut bias = fields(words, 1, vocabulary, &device).sub_scalar(1.0).mul_scalar(-Self::FORBIDDEN);
        if !biases.is_empty() {
            bias = bias + biases_of(biases, vocabulary, &device);
        }
        self.bias.inplace(|all| all.slice_assign([line..line + 1, 0..vocabulary], bias));
    }
}

/// A token's index in a line.
fn known(token: u32, vocabulary: usize) -> usize {
    let known = (token as usize) < vocabulary;
    assert!(known, "head_sample: token {token} of a vocabulary of {vocabulary} tokens");
    token as usize
}

/// A line of biases.
fn biases_of<B: Backend>(biases: &[(u32, f32)], vocabulary: usize, device: &B::Device) -> Tensor<B, 2> {
    if biases.is_empty() {
        return Tensor::zeros([1, vocabulary], (device, DType::F32));
    }
    let mut values = vec![0.0; vocabulary];
    biases.iter().for_each(|(token, more)| values[known(*token, vocabulary)] += more);
    Tensor::from_data(TensorData::new(values, [1, vocabulary]), (device, DType::F32))
}

/// Uploads a line of numbers compactly: nothing if all are zero, and bytes if these suffice.
fn numbers<B: Backend>(numbers: &[u32], device: &B::Device) -> Tensor<B, 2> {
    let shape = [1, numbers.len()];
    match numbers.iter().max() {
        None | Some(0) => Tensor::zeros(shape, (device, DType::F32)),
        Some(..=255) => {
            let word = |four: &[u32]| four.iter().rev().fold(0, |word, number| word << 8 | number).cast_signed();
            fields(numbers.chunks(4).map(word).collect(), 8, numbers.len(), device)
        }
        Some(_) => {
            let numbers: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
            Tensor::from_data(TensorData::new(numbers, shape), (device, DType::F32))
        }
    }
}

/// A line of `count` numbers of this many bits each, as many per word as fit, lowest first.
fn fields<B: Backend>(words: Vec<i32>, bits: u32, count: usize, device: &B::Device) -> Tensor<B, 2> {
    let (each, all) = ((32 / bits) as usize, words.len());
    let words = Tensor::<B, 1, Int>::from_data(TensorData::new(words, [all]), device);
    let shifts = Tensor::<B, 1, Int>::arange_step(0..32, bits as usize, device).reshape([1, each]).expand([all, each]);
    let mask = (1i32 << bits) - 1;
    let fields =
        words.reshape([all, 1]).expand([all, each]).bitwise_right_shift(shifts).bitwise_and_scalar(mask.elem());
    fields.reshape([1, each * all]).narrow(1, 0, count).float().cast(DType::F32)
}

/// A row to sample a token for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledRow {
    /// Its sampling parameters.
    pub sampling: Sampling,
    /// Its sequence's line of [`TokenCounts`], if any, for penalties and biases.
    pub line: Option<usize>,
}

impl From<Sampling> for SampledRow {
    fn from(sampling: Sampling) -> Self {
        Self { sampling, line: None }
    }
}

/// Rows sampled alike: which truncations apply, and whether logits are modified first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) draws: bool,
    pub(crate) top_k: bool,
    pub(crate) top_p: bool,
    pub(crate) min_p: bool,
    pub(crate) counted: bool,
}

impl Kind {
    fn of(SampledRow { sampling, line }: &SampledRow) -> Self {
        let draws = sampling.temperature > 0.0;
        Self {
            draws,
            top_k: draws && sampling.top_k.is_some(),
            top_p: draws && sampling.top_p.is_some_and(|top_p| top_p < 1.0),
            min_p: draws && sampling.min_p.is_some_and(|min_p| min_p > 0.0),
            counted: line.is_some(),
        }
    }
}

/// The rows of a batch to sample, each with its own parameters.
#[derive(Clone, Debug)]
pub struct SampledRows<B: Backend> {
    pub(crate) rows: Vec<SampledRow>,
    /// Number of rows of each kind.
    pub(crate) kinds: Vec<(Kind, usize)>,
    /// Row indices grouped by kind, `[rows]`.
    pub(crate) members: Tensor<B, 1, Int>,
    /// The random stream of each row, `[rows]`.
    pub(crate) streams: Tensor<B, 1, Int>,
    /// The line of counts of each row, `[rows]`; -1 for none.
    pub(crate) lines: Tensor<B, 1, Int>,
    /// `[rows, NUMBERS]`.
    pub(crate) numbers: Tensor<B, 2>,
}

impl<B: Backend> SampledRows<B> {
    /// Number of rows.
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// Whether all rows are greedy, with unmodified logits.
    pub fn are_greedy(&self) -> bool {
        self.kinds.iter().all(|(kind, _)| !kind.draws && !kind.counted)
    }

    /// From rows in batch order.
    ///
    /// # Panics
    /// If there are none, two share a line, or a row's parameters are invalid: see
    /// [`Sampling::validate`].
    pub fn new(rows: &[SampledRow], device: &B::Device) -> Self {
        assert!(!rows.is_empty(), "head_sample: no rows");
        if let Some(reason) = rows.iter().find_map(|row| row.sampling.validate().err()) {
            panic!("head_sample: {reason}");
        }
        // Rows count their tokens in their lines concurrently.
        let mut lines: Vec<usize> = rows.iter().filter_map(|row| row.line).collect();
        lines.sort_unstable();
        if let Some(pair) = lines.windows(2).find(|pair| pair[0] == pair[1]) {
            panic!("head_sample: two rows have line {}", pair[0]);
        }
        let mut members: Vec<usize> = (0..rows.len()).collect();
        members.sort_by_key(|row| Kind::of(&rows[*row]));
        let mut kinds: Vec<(Kind, usize)> = Vec::new();
        for row in &members {
            let kind = Kind::of(&rows[*row]);
            match kinds.last_mut() {
                Some((last, count)) if *last == kind => *count += 1,
                _ => kinds.push((kind, 1)),
            }
        }
        let integers = |values: Vec<i32>| {
            let shape = [values.len()];
            Tensor::from_data(TensorData::new(values, shape), device)
        };
        let numbers: Vec<f32> = rows.iter().flat_map(|row| row.sampling.numbers()).collect();
        let numbers = TensorData::new(numbers, [rows.len() * NUMBERS]);
        Self {
            kinds,
            members: integers(members.iter().map(|row| *row as i32).collect()),
            streams: integers(rows.iter().map(|row| row.sampling.stream as i32).collect()),
            lines: integers(rows.iter().map(|row| row.line.map_or(-1, |line| line as i32)).collect()),
            numbers: Tensor::<B, 1>::from_data(numbers, (device, DType::F32)).reshape([rows.len(), NUMBERS]),
            rows: rows.to_vec(),
        }
    }

    /// The rows.
    pub fn rows(&self) -> &[SampledRow] {
        &self.rows
    }

    /// Checks that there is a row for each of the logits `[batch_size, vocabulary]`, on the device
    /// of `like`, and that each line exists.
    pub(crate) fn check(
        &self,
        op: &'static str,
        counts: Option<&TokenCounts<B>>,
        [batch_size, vocabulary]: [usize; 2],
        like: &Part<'_, B::Device>,
    ) {
        assert!(vocabulary <= MOST_TOKENS, "{op}: a vocabulary of {vocabulary} tokens is too large");
        let Self { rows, kinds, members, streams, lines, numbers } = self;
        let streams = part(op, "rows", streams).integer().shaped(&[batch_size], like);
        for (name, x) in [("members", members), ("lines", lines)] {
            part(op, name, x).shaped(&[batch_size], like).alike(&streams);
        }
        part(op, "numbers", numbers).of(DType::F32).shaped(&[batch_size, NUMBERS], like);
        assert_eq!(kinds.iter().map(|(_, count)| count).sum::<usize>(), batch_size, "{op}: rows of all kinds");
        let lines = rows.iter().filter_map(|row| row.line).max().map_or(0, |last| last + 1);
        match counts {
            Some(TokenCounts { prompt, written, bias }) => {
                let n_lines = prompt.dims()[0];
                let shape = [n_lines, vocabulary];
                assert!(lines <= n_lines, "{op}: line {} of {n_lines}", lines.saturating_sub(1));
                part(op, "counts of the prompts", prompt).of(DType::F32).shaped(&shape, like);
                part(op, "counts of generated tokens", written).of(DType::F32).shaped(&shape, like);
                part(op, "biases", bias).of(DType::F32).shaped(&shape, like);
            }
            None => assert!(lines == 0, "{op}: line {} without counts", lines.saturating_sub(1)),
        }
    }
}
