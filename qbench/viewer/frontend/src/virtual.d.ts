declare module "virtual:methods" {
  const methods: { name: string; title: string; says: string; mathml: string; reference: string; url: string }[];
  export default methods;
}
