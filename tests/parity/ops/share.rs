//! Tensors that other libraries read.

use fireclay_kernels::{DeviceTensor, Place, reclaim_shared};

use crate::backend_test;
use crate::compare::{random, values};

backend_test!(shared_tensors_are_what_they_were_shared_as::<B>(device) {
    let x = random::<B, 3>(3, [3, 5, 7], &device);
    let views =
        [x.clone(), x.clone().swap_dims(1, 2).reshape([3, 5, 7]), x.narrow(1, 1, 3).repeat_dim(1, 2).narrow(1, 0, 5)];
    for x in views {
        let (wanted, dims) = (values(&x), x.dims());
        let tensor = DeviceTensor::new(x);
        assert_eq!(tensor.shape(), dims);
        let read = tensor.read().expect("the device works");
        assert_eq!(read.iter::<f32>().collect::<Vec<_>>(), wanted);
        // What is computed meanwhile is computed elsewhere.
        let Some(shared) = tensor.share().expect("the device works") else { continue };
        let again = tensor.share().expect("the device works").expect("as before");
        assert_eq!((shared.address(), shared.place()), (again.address(), again.place()));
        assert!(shared.place() != Place::Host || cfg!(feature = "ndarray"));
        assert_eq!((shared.shape(), shared.dtype()), (&dims[..], tensor.dtype()));
        let end: isize = shared.strides().iter().zip(dims).map(|(stride, size)| stride * (size as isize - 1)).sum();
        assert!(end >= 3 * 5 * 7 - 1, "{:?}", shared.strides());
        drop((shared, again, tensor));
        assert_eq!(reclaim_shared(), 0);
    }
});
