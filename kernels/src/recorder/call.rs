//! Description of a call: inputs, and the minimum of bytes and FLOP.

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
    /// Minimum bytes moved: each input read once and each output written once.
    pub bytes: u64,
    /// FLOP of its matrix products.
    pub flops: u64,
}

impl Call {
    /// A call that reads each of `inputs` once.
    pub fn reads(inputs: impl Into<Vec<Operand>>) -> Self {
        let inputs = inputs.into();
        let bytes = inputs.iter().map(Operand::bytes).sum();
        Self { inputs, bytes, flops: 0 }
    }

    /// Adds moved bytes.
    pub fn and(mut self, bytes: u64) -> Self {
        self.bytes += bytes;
        self
    }

    /// Adds the first input's size this many times.
    pub fn and_first(self, times: u64) -> Self {
        let bytes = self.inputs.first().map_or(0, Operand::bytes);
        self.and(times * bytes)
    }

    /// Adds FLOP.
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

/// A part of a model, such as "attention", under which operations are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part(&'static str);

/// The scope of a part, for this thread's operations.
#[must_use = "the span ends when this is dropped"]
pub struct PartScope {
    around: &'static str,
    // It must end on the thread where it started.
    _thread: PhantomData<*const ()>,
}

impl Part {
    /// This thread's current part: a graph node keeps it for its backward pass.
    pub(crate) fn current() -> Self {
        Self(PART.get())
    }

    /// Its name; empty outside of any part.
    pub(crate) fn name(self) -> &'static str {
        self.0
    }

    /// Enters the part again.
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

/// Reports this thread's operations until the scope ends, and their backward passes, under the part
/// `name` of a model.
#[inline]
pub fn part(name: &'static str) -> PartScope {
    Part(name).enter()
}
