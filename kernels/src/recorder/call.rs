//! What an operation's call says of itself: inputs, and the least that it must move and compute.

use std::cell::Cell;
use std::marker::PhantomData;

use super::Operand;

thread_local! {
    static PART: Cell<&'static str> = const { Cell::new("") };
}

/// A call of an operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    /// Shape and dtype of its inputs.
    pub inputs: Vec<Operand>,
    /// Bytes that have to be moved between processor and memory, at least: each input read and each output written once.
    pub bytes: u64,
    /// Multiplications and additions of its matrix products.
    pub flops: u64,
}

impl Call {
    /// A call that reads each of `inputs` once.
    pub fn reads(inputs: impl Into<Vec<Operand>>) -> Self {
        let inputs = inputs.into();
        let bytes = inputs.iter().map(Operand::bytes).sum();
        Self { inputs, bytes, flops: 0 }
    }

    /// And moves so many bytes more.
    pub fn and(mut self, bytes: u64) -> Self {
        self.bytes += bytes;
        self
    }

    /// And moves what the first input holds, so many times more.
    pub fn and_first(self, times: u64) -> Self {
        let bytes = self.inputs.first().map_or(0, Operand::bytes);
        self.and(times * bytes)
    }

    /// And computes so many multiplications and additions.
    pub fn computes(mut self, flops: u64) -> Self {
        self.flops += flops;
        self
    }
}

impl From<Vec<Operand>> for Call {
    fn from(inputs: Vec<Operand>) -> Self {
        Self { inputs, ..Self::default() }
    }
}

/// A part of a model, such as "attention": what its operations are reported under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part(&'static str);

/// The span of a part: operations that this thread calls meanwhile belong to it.
#[must_use = "the span ends when this is dropped"]
pub struct PartScope {
    around: &'static str,
    // It must end on the thread that it began on.
    _thread: PhantomData<*const ()>,
}

impl Part {
    /// The part that this thread is in: a graph's node keeps it for its backward pass.
    pub(crate) fn current() -> Self {
        Self(PART.get())
    }

    /// Its name; empty outside of any part.
    pub(crate) fn name(self) -> &'static str {
        self.0
    }

    /// Goes back into the part.
    #[inline]
    pub(crate) fn enter(self) -> PartScope {
        PartScope { around: PART.replace(self.0), _thread: PhantomData }
    }
}

impl Drop for PartScope {
    #[inline]
    fn drop(&mut self) {
        PART.set(self.around);
    }
}

/// What this thread calls from here on, until the span ends, is done for the part `name` of a model; its backward passes
/// are, too.
#[inline]
pub fn part(name: &'static str) -> PartScope {
    Part(name).enter()
}
