//! The exact contents of a recording: on every backend the calls, on CUDA the device's work too.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::{DType, Int, Tensor};
use fireclay_kernels::recorder::{
    Call, Copies, Operand, RecorderError, Recording, Report, Source, Work, fell_back, op, part, read_back,
};
use fireclay_kernels::{
    Activation, ActivationKind, Backend, Dropout, Norm, RandomKey, activate, dropout, linear, norm,
};

use crate::backend_test;
use crate::compare::random;

const SILU: Activation = Activation { kind: ActivationKind::Silu, gated: false };

/// A recording of `work`.
fn record<B: Backend>(device: &B::Device, work: impl FnOnce()) -> Report {
    let recording = Recording::start::<B>(device).expect("a recording");
    work();
    let report = recording.stop().expect("a report");
    let wanted = match B::name(device).as_str() {
        name if name.contains("cuda") => Source::Cupti,
        name if name.contains("ndarray") => Source::Host,
        _ => Source::Calls,
    };
    assert_eq!(report.source, wanted, "the source on {}", B::name(device));
    report
}

/// An operation without a description.
fn recorder_op(name: &'static str, inputs: impl FnOnce() -> Vec<Operand>) -> fireclay_kernels::recorder::Scope {
    op(name, || Call::from(inputs()))
}

/// Without CUPTI the device's work is unknown, and reported as such.
fn assert_calls_alone(report: &Report) {
    assert_eq!((report.total, report.outside), (Work::default(), Work::default()));
    assert!(report.ops.iter().all(|op| op.work == Work::default()) && report.kernels.is_none(), "{report}");
    assert!(report.to_string().contains("device to host: unknown"), "{report}");
    assert!(report.to_json().contains(r#""to_host":null"#), "{}", report.to_json());
}

backend_test!(calls_are_counted_with_their_shapes::<B>(device) {
    let x = random::<B, 3>(1, [2, 3, 8], &device);
    let wide = random::<B, 2>(2, [5, 16], &device);
    let gamma = Tensor::<B, 1>::ones([8], &device);
    let report = record::<B>(&device, || {
        let x = norm(x, &Norm::rms(gamma, 1e-6));
        activate(x.clone(), SILU);
        activate(wide, SILU);
        activate(x, SILU);
        dropout(random::<B, 2>(3, [7, 9], &device), Dropout { probability: 0.5, key: RandomKey::new(1) });
    });
    let names: Vec<_> = report.ops.iter().map(|op| (op.name, op.calls)).collect();
    assert_eq!(names, [("norm", 1), ("activate", 2), ("activate", 1), ("dropout", 1)]);
    assert_eq!((report.calls("activate"), report.calls("linear")), (3, 0));
    let inputs: Vec<_> = report.ops.iter().map(|op| op.inputs.clone()).collect();
    let of = |dims: &[usize]| vec![Operand::new(dims, DType::F32)];
    assert_eq!(inputs, [of(&[2, 3, 8]), of(&[2, 3, 8]), of(&[5, 16]), of(&[7, 9])]);
    // Each input read and each output written once.
    assert_eq!(report.ops.iter().map(|op| op.bytes).collect::<Vec<_>>(), [2 * 192, 2 * 2 * 192, 2 * 320, 2 * 252]);
    if report.source != Source::Cupti {
        assert_calls_alone(&report);
    }
});

backend_test!(backward_passes_are_operations_of_their_own::<B>(device) {
    let x = Tensor::<Autodiff<B>, 2>::from_inner(random(1, [4, 8], &device)).require_grad();
    let weight = Tensor::<Autodiff<B>, 2>::from_inner(random(2, [6, 8], &device)).require_grad();
    let report = record::<Autodiff<B>>(&device, || {
        let mask = Dropout { probability: 0.5, key: RandomKey::new(3) };
        let y = dropout(activate(linear(x, weight, None), SILU), mask);
        y.sum().backward();
    });
    let names: Vec<_> = report.ops.iter().map(|op| (op.name, op.calls)).collect();
    let backward = [("dropout backward", 1), ("activate backward", 1), ("linear backward", 1)];
    assert_eq!(names, [&[("linear", 1), ("activate", 1), ("dropout", 1)], &backward[..]].concat());
});

backend_test!(a_reference_run_for_want_of_a_kernel_is_caught::<B>(device) {
    let report = record::<B>(&device, || {
        fell_back("recorder test", "a device", "it has no such units");
        fell_back("recorder test", "a device", "it has no such units");
    });
    let [fallback] = &report.fallbacks[..] else { panic!("one fallback: {report}") };
    assert_eq!((fallback.op, &*fallback.device, fallback.count), ("recorder test", "a device", 2));
    assert!(report.to_string().contains("recorder test ran its reference on a device 2 times: it has no such units"));
    // On every backend, this operation has a kernel, or its reference is the default.
    let x = random::<B, 2>(1, [4, 8], &device);
    let report = record::<B>(&device, || drop(activate(x, SILU)));
    assert!(report.fallbacks.is_empty(), "{report}");
});

backend_test!(a_read_is_caught::<B>(device) {
    let x = random::<B, 1>(1, [4096], &device);
    let y = activate(x, SILU);
    let report = record::<B>(&device, || assert_eq!(y.clone().into_data().num_elements(), 4096));
    match report.source {
        Source::Calls | Source::Host | Source::Waits => assert_calls_alone(&report),
        Source::Cupti => {
            let copies = report.total.to_host.expect("known");
            assert_eq!((copies.count, copies.bytes), (1, 4 * 4096), "{report}");
            assert!(copies.time.is_some_and(|time| time > Duration::ZERO), "{report}");
            assert!(report.total.synchronisations.is_some_and(|waits| waits > 0), "{report}");
            assert_eq!((report.outside.to_host, report.total.launches), (Some(copies), Some(0)), "{report}");
        }
    }
    let report = record::<B>(&device, || drop(activate(y, SILU)));
    match report.source {
        Source::Calls | Source::Host | Source::Waits => assert_calls_alone(&report),
        Source::Cupti => {
            let none = Some(Copies { time: Some(Duration::ZERO), ..Copies::default() });
            assert_eq!((report.total.to_host, report.total.to_device), (none, none), "{report}");
            assert_eq!(report.total.synchronisations, Some(0), "the recording's own waits do not count: {report}");
        }
    }
});

backend_test!(an_upload_is_caught::<B>(device) {
    let report = record::<B>(&device, || drop(Tensor::<B, 1, Int>::from_ints([7; 64], &device)));
    match report.source {
        Source::Calls | Source::Host | Source::Waits => assert_calls_alone(&report),
        Source::Cupti => {
            let copies = report.outside.to_device.expect("known");
            assert!(copies.count == 1 && copies.bytes >= 4 * 64, "{report}");
        }
    }
});

backend_test!(work_belongs_to_its_operation::<B>(device) {
    let x = random::<B, 2>(1, [64, 128], &device);
    let weight = random::<B, 2>(2, [32, 128], &device);
    let work = || {
        // Outside of operations, before, between and after.
        let x = x.clone() * 2.0;
        let y = linear(x, weight.clone(), None) + 1.0;
        activate(y, SILU) - 1.0
    };
    // The first run compiles kernels and tunes the product.
    drop(work());
    let report = record::<B>(&device, || drop(work()));
    match report.source {
        Source::Calls | Source::Host | Source::Waits => assert_calls_alone(&report),
        Source::Cupti => {
            let mut sum = report.outside;
            report.ops.iter().for_each(|op| sum += op.work);
            assert_eq!(sum, report.total, "{report}");
            assert!(report.ops.iter().all(|op| op.work.launches.is_some_and(|launches| launches > 0)), "{report}");
            assert!(
                report.ops.iter().all(|op| op.work.kernel_time.is_some_and(|time| time > Duration::ZERO)),
                "{report}"
            );
            assert_eq!(report.op("activate").and_then(|op| op.work.launches), Some(1), "{report}");
            assert_eq!(report.outside.launches, Some(3), "{report}");
            let kernels = report.kernels.as_ref().expect("known");
            let launches: u64 = kernels.iter().map(|kernel| kernel.launches).sum();
            let time: Duration = kernels.iter().map(|kernel| kernel.time.expect("known")).sum();
            assert_eq!((Some(launches), Some(time)), (report.total.launches, report.total.kernel_time), "{report}");
            assert!(report.total.device_time().is_some_and(|time| time <= report.elapsed), "{report}");
        }
    }
});

backend_test!(work_of_another_thread_is_of_no_operation_here::<B>(device) {
    let x = random::<B, 2>(1, [64, 128], &device);
    let other = x.clone();
    drop((activate(x.clone(), SILU), x.clone() * 2.0));
    let report = record::<B>(&device, || {
        let launch = std::thread::spawn(move || {
            (0..20).for_each(|_| drop(other.clone() * 2.0));
            B::sync(&other.device()).expect("a device");
        });
        (0..20).for_each(|_| drop(activate(x.clone(), SILU)));
        launch.join().expect("a thread");
    });
    assert_eq!(report.op("activate").map(|op| op.calls), Some(20));
    match report.source {
        Source::Calls | Source::Host | Source::Waits => assert_calls_alone(&report),
        Source::Cupti => {
            assert_eq!(report.op("activate").and_then(|op| op.work.launches), Some(20), "{report}");
            assert_eq!(report.outside.launches, Some(20), "{report}");
        }
    }
});

backend_test!(there_is_one_recording_at_a_time::<B>(device) {
    let x = random::<B, 2>(1, [4, 8], &device);
    let recording = Recording::start::<B>(&device).expect("a recording");
    assert_eq!(Recording::start::<B>(&device).err(), Some(RecorderError::Running));
    assert_eq!(Recording::start_calls::<B>(&device).err(), Some(RecorderError::Running));
    drop(activate(x.clone(), SILU));
    assert_eq!(recording.stop().expect("a report").op("activate").map(|op| op.calls), Some(1));

    // Nothing is recorded after the end, and dropping a recording allows another one.
    drop(activate(x.clone(), SILU));
    drop(Recording::start::<B>(&device).expect("a recording"));
    drop(activate(x.clone(), SILU));
    assert!(record::<B>(&device, || ()).ops.is_empty());

    let recording = Recording::start_calls::<B>(&device).expect("a recording");
    drop(activate(x, SILU));
    let report = recording.stop().expect("a report");
    assert!(report.source != Source::Cupti && report.ops.len() == 1, "{report}");
    assert_calls_alone(&report);
});

backend_test!(what_is_done_for_a_part_is_reported_under_it::<B>(device) {
    let x = Tensor::<Autodiff<B>, 2>::from_inner(random(1, [4, 8], &device)).require_grad();
    let weight = Tensor::<Autodiff<B>, 2>::from_inner(random(2, [6, 8], &device)).require_grad();
    let report = record::<Autodiff<B>>(&device, || {
        let inside = part("feed_forward");
        let y = linear(x, weight, None);
        drop(inside);
        // The backward pass of the first belongs to its part, although it comes later.
        activate(y, SILU).sum().backward();
    });
    let names: Vec<_> = report.ops.iter().map(|op| (op.part, op.name)).collect();
    let backward = [("", "activate backward"), ("feed_forward", "linear backward")];
    assert_eq!(names, [&[("feed_forward", "linear"), ("", "activate")], &backward[..]].concat());
    // Products of [4, 8] and [8, 6], one forward and two backward.
    assert_eq!(report.ops.iter().map(|op| op.flops).sum::<u64>(), 3 * 2 * 4 * 8 * 6);
});

backend_test!(time_of_an_operation_is_its_own::<B>(device) {
    let x = random::<B, 2>(1, [64, 64], &device);
    let pause = Duration::from_millis(20);
    let recording = Recording::start_waiting::<B>(&device).expect("a recording");
    {
        let _outer = recorder_op("outer", Vec::new);
        let _inner = recorder_op("inner", Vec::new);
        std::thread::sleep(pause);
    }
    drop(activate(x, SILU));
    let report = recording.stop().expect("a report");
    assert!(matches!(report.source, Source::Host | Source::Waits), "{report}");
    let time = |name: &str| report.op(name).and_then(|op| op.host_time).expect("known");
    assert!(time("inner") >= pause && time("outer") < pause, "{report}");
    assert!(time("activate") > Duration::ZERO && report.spans.len() == 3, "{report}");
    assert!(report.spans.iter().all(|span| span.start <= span.end && span.end <= report.elapsed), "{report}");
});

backend_test!(transfers_that_are_told_of_name_who_asked::<B>(device) {
    let report = record::<B>(&device, || {
        read_back(8);
        let _inside = part("head");
        let _op = recorder_op("peek", Vec::new);
        read_back(4);
        read_back(4);
    });
    let reads: Vec<_> = report.reads.iter().map(|read| (read.part, read.op, read.count, read.bytes)).collect();
    assert_eq!(reads, [("", "", 1, 8), ("head", "peek", 2, 8)]);
});
