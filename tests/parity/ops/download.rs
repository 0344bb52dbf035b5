//! Copies to the host.

use fireclay_kernels::{download_float, download_int};

use crate::backend_test;
use crate::compare::{random, values};
use crate::harness::integers;

// Later writes to their memory, or later computations, do not affect them.
backend_test!(downloads_are_what_tensors_were_when_they_began::<B>(device) {
    let mut begun = Vec::new();
    for round in 0..40 {
        let whole: Vec<i32> = (0..33).map(|at| 100 * round + at).collect();
        let ints = integers::<B, 1>(whole.clone(), [33], &device).mul_scalar(3);
        let floats = random::<B, 2>(round as u64, [5, 7], &device).transpose();
        let wanted = values(&floats);
        begun.push((download_int(ints), download_float(floats), whole, wanted));
        let others = random::<B, 2>(7, [5, 7], &device) + 1.0;
        drop(others);
    }
    for (ints, floats, whole, wanted) in begun {
        let ints: Vec<i64> = ints.wait().expect("the device works").iter().collect();
        assert_eq!(ints, whole.iter().map(|value| 3 * i64::from(*value)).collect::<Vec<_>>());
        let floats = floats.wait().expect("the device works");
        assert_eq!(floats.shape.to_vec(), [7, 5]);
        assert_eq!(floats.iter::<f32>().collect::<Vec<_>>(), wanted);
    }
});
