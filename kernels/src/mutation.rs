//! Corrupts one result of one operation, to show that a test fails.
//!
//! For test builds with the feature `mutation`; otherwise [`result`] and [`state`] do nothing. A
//! result is named `method.part`: a method of an operation's trait, such as `linear_backward`, and
//! a tensor of its result, such as `weight`. `FIRECLAY_MUTATION=linear_backward.weight:zeros`
//! corrupts it wherever it is computed, and `FIRECLAY_MUTATION_LOG=FILE` logs each result that a
//! test computes.

#[cfg(not(feature = "mutation"))]
mod off {
    /// The result of a method, unchanged.
    #[inline(always)]
    pub(crate) fn result<T>(_method: &'static str, result: T) -> T {
        result
    }

    /// A method's written state, unchanged.
    #[inline(always)]
    pub(crate) fn state<T>(_method: &'static str, _part: &'static str, _state: &mut T) {}
}
#[cfg(not(feature = "mutation"))]
pub(crate) use off::{result, state};

/// The result of a backend method, where every caller gets it from.
macro_rules! call {
    ($backend:ident: $ops:ident::$method:ident($operands:expr)) => {
        $crate::mutation::result(stringify!($method), <$backend as $ops>::$method($operands))
    };
}
pub(crate) use call;

/// The parts of a result: these fields are corrupted under their names, except for those that are
/// `kept`.
macro_rules! parts {
    ($name:ident { $($field:ident),* } $(kept $($kept:ident),*)?) => {
        #[cfg(feature = "mutation")]
        impl<B: burn::tensor::backend::Backend> $crate::mutation::Corrupt for $name<B> {
            fn corrupt(self, spot: &$crate::mutation::Spot) -> Self {
                let Self { $($field,)* $($($kept,)*)? } = self;
                Self {
                    $($field: $crate::mutation::Corrupt::corrupt($field, &spot.part(stringify!($field))),)*
                    $($($kept,)*)?
                }
            }
        }
    };
}
pub(crate) use parts;

#[cfg(feature = "mutation")]
mod on {
    use std::collections::HashSet;
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::time::{Duration, Instant};

    use burn::tensor::backend::Backend;
    use burn::tensor::{Int, Tensor, TensorData};

    /// The kinds of corruption. Rows are along a tensor's last axis, or single elements if it has
    /// one axis.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Kind {
        /// All floats become zero.
        Zeros,
        /// Each row of floats becomes the one before it, the first one the last.
        PreviousRow,
        /// All floats times 1.05.
        Factor,
        /// The last nonzero row of floats becomes zero.
        WrongRow,
        /// The last integer plus one.
        OffByOne,
        /// Swaps the last two differing neighbours of the integers.
        SwappedPair,
    }

    const NAMES: [(&str, Kind); 6] = [
        ("zeros", Kind::Zeros),
        ("previous-row", Kind::PreviousRow),
        ("factor", Kind::Factor),
        ("wrong-row", Kind::WrongRow),
        ("off-by-one", Kind::OffByOne),
        ("swapped-pair", Kind::SwappedPair),
    ];

    struct Settings {
        /// A result's name, and its corruption.
        mutation: Option<(String, Kind)>,
        log: Option<Mutex<Log>>,
    }

    struct Log {
        file: File,
        start: Instant,
        /// Logged lines by test.
        lines: HashSet<(String, String)>,
        last: Duration,
    }

    fn settings() -> &'static Settings {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let mutation = std::env::var("FIRECLAY_MUTATION").ok().map(|text| {
                let (spot, name) = text.rsplit_once(':').expect("FIRECLAY_MUTATION is method.part:kind");
                let kind = NAMES.iter().find(|(known, _)| *known == name).expect("a known kind of mutation").1;
                (spot.to_string(), kind)
            });
            let log = std::env::var_os("FIRECLAY_MUTATION_LOG").map(|path| {
                let file = OpenOptions::new().create(true).append(true).open(path).expect("a log that can be written");
                Mutex::new(Log { file, start: Instant::now(), lines: HashSet::new(), last: Duration::ZERO })
            });
            Settings { mutation, log }
        })
    }

    /// The result of a method, corrupted if requested.
    pub(crate) fn result<T: Corrupt>(method: &'static str, result: T) -> T {
        let Settings { mutation, log } = settings();
        if mutation.is_none() && log.is_none() {
            return result;
        }
        result.corrupt(&Spot { method, part: String::new() })
    }

    /// A method's written state, corrupted if requested.
    pub(crate) fn state<T: Corrupt + Clone>(method: &'static str, part: &'static str, state: &mut T) {
        let Settings { mutation, log } = settings();
        if mutation.is_some() || log.is_some() {
            *state = state.clone().corrupt(&Spot { method, part: format!(".{part}") });
        }
    }

    /// The tensors of a result.
    #[derive(Clone)]
    pub(crate) struct Spot {
        method: &'static str,
        part: String,
    }

    impl Spot {
        pub(crate) fn part(&self, name: &str) -> Self {
            Self { part: format!("{}.{name}", self.part), ..self.clone() }
        }

        /// The corruption to apply here, if any. Logs that a test computes `floats` or `integers`,
        /// with one row or several.
        fn kind(&self, computed: &str) -> Option<Kind> {
            let name = format!("{}{}", self.method, self.part);
            let Settings { mutation, log } = settings();
            if let (Some(log), Some(test)) = (log, std::thread::current().name()) {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                let now = log.start.elapsed();
                let line = (test.to_string(), format!("{name}\t{computed}"));
                // Log again at intervals, to measure a test's time.
                if log.lines.insert(line.clone()) || now - log.last > Duration::from_millis(20) {
                    log.last = now;
                    writeln!(log.file, "{}\t{}\t{}", line.0, line.1, now.as_millis()).expect("the log takes a line");
                }
            }
            mutation.as_ref().filter(|(spot, _)| *spot == name).map(|(_, kind)| *kind)
        }
    }

    /// A method's result.
    pub(crate) trait Corrupt: Sized {
        fn corrupt(self, spot: &Spot) -> Self;
    }

    /// Rows and columns.
    fn rows<const D: usize>(dims: [usize; D]) -> [usize; 2] {
        let columns = if D == 1 { 1 } else { dims[D - 1] };
        [dims.iter().product::<usize>() / columns.max(1), columns]
    }

    fn previous<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
        let dims = x.dims();
        let [count, columns] = rows(dims);
        let x = x.reshape([count, columns]);
        Tensor::cat(vec![x.clone().narrow(0, count - 1, 1), x.narrow(0, 0, count - 1)], 0).reshape(dims)
    }

    impl<B: Backend, const D: usize> Corrupt for Tensor<B, D> {
        fn corrupt(self, spot: &Spot) -> Self {
            let [count, columns] = rows(self.dims());
            let Some(kind) = spot.kind(if count > 1 { "floats" } else { "row" }) else { return self };
            match kind {
                Kind::Zeros => self * 0.0,
                Kind::Factor => self * 1.05,
                Kind::PreviousRow if count > 1 => previous(self),
                Kind::WrongRow if count > 1 => {
                    let values: Vec<f32> = self.clone().into_data().iter::<f32>().collect();
                    let wrong = values.chunks(columns).rposition(|row| row.iter().any(|value| *value != 0.0));
                    let Some(wrong) = wrong else { return self };
                    let mut kept = vec![1.0f32; count];
                    kept[wrong] = 0.0;
                    let kept = Tensor::<B, 2>::from_data(TensorData::new(kept, [count, 1]), &self.device());
                    let (dims, dtype) = (self.dims(), self.dtype());
                    (self.reshape([count, columns]) * kept.cast(dtype)).reshape(dims)
                }
                _ => self,
            }
        }
    }

    impl<B: Backend, const D: usize> Corrupt for Tensor<B, D, Int> {
        fn corrupt(self, spot: &Spot) -> Self {
            let count = self.dims().iter().product::<usize>();
            let Some(kind) = spot.kind(if count > 1 { "integers" } else { "integer" }) else { return self };
            let mut values: Vec<i64> = self.clone().into_data().iter::<i64>().collect();
            match kind {
                Kind::OffByOne => values[count - 1] += 1,
                Kind::SwappedPair => {
                    let Some(at) = values.windows(2).rposition(|pair| pair[0] != pair[1]) else { return self };
                    values.swap(at, at + 1);
                }
                _ => return self,
            }
            like(&self, values)
        }
    }

    /// A tensor with other values, in the same dtype and on the same device.
    fn like<B: Backend, const D: usize>(x: &Tensor<B, D, Int>, values: Vec<i64>) -> Tensor<B, D, Int> {
        let data = TensorData::new(values, x.dims()).convert_dtype(x.dtype());
        Tensor::from_data(data, (&x.device(), x.dtype()))
    }

    impl<T: Corrupt> Corrupt for Option<T> {
        fn corrupt(self, spot: &Spot) -> Self {
            if self.is_none() {
                spot.kind("nothing");
            }
            self.map(|value| value.corrupt(spot))
        }
    }

    impl<T: Corrupt, E> Corrupt for Result<T, E> {
        fn corrupt(self, spot: &Spot) -> Self {
            if self.is_err() {
                spot.kind("declined");
            }
            self.map(|value| value.corrupt(spot))
        }
    }

    impl<T: Corrupt> Corrupt for Vec<T> {
        fn corrupt(self, spot: &Spot) -> Self {
            self.into_iter().map(|value| value.corrupt(spot)).collect()
        }
    }

    impl<T: Corrupt> Corrupt for [T; 2] {
        fn corrupt(self, spot: &Spot) -> Self {
            let [a, b] = self;
            [a.corrupt(&spot.part("0")), b.corrupt(&spot.part("1"))]
        }
    }

    impl<T: Corrupt, U: Corrupt> Corrupt for (T, U) {
        fn corrupt(self, spot: &Spot) -> Self {
            (self.0.corrupt(&spot.part("0")), self.1.corrupt(&spot.part("1")))
        }
    }
}
#[cfg(feature = "mutation")]
pub(crate) use on::{Corrupt, Spot, result, state};
